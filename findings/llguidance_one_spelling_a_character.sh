#!/usr/bin/env bash
# llguidance 1.9.1.
#
# Guess: a grammar made of {"type": "string"} takes every JSON string, however JSON lets its characters be written.
#
# Behaviour: a character that JSON need not escape can be written in one way, as itself; a quote in one way, as \".
# Control characters have both of their forms. So an output that was written by json.dumps with its default
# ensure_ascii, or by PHP, which writes \/, cannot be produced or replayed.
#
# Seen: the raw letter, \n, \u000a and \" are taken; \u00e9, \/, \u0022 and a surrogate pair are not.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string"}))


def takes(text):
    json.loads(text)  # valid
    matcher = LLMatcher(tokenizer, grammar)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


texts = ['"\u00e9"', r'"\n"', r'"\u000a"', r'"\""', r'"\u00e9"', r'"a\/b"', r'"\u0022"', r'"\ud83d\ude00"']
found = {text: takes(text) for text in texts}
print(found)
assert list(found.values()) == [True] * 4 + [False] * 4, found
PYTHON
