#!/usr/bin/env bash
# xgrammar 0.2.8.
#
# Guess: `str(grammar)` is text from which `Grammar.from_ebnf` makes the same grammar.
#
# Behaviour: a character from U+0080 to U+00FF is printed as \x and two digits, but \x is read with as many hexadecimal
# digits as follow. So a letter from a to f, or a digit, behind such a character becomes a part of it.
#
# Seen: the property "größe" is printed as gr\xf6\xdfe, and comes back as gr\xf6\u0dfe: "ße" has become U+0DFE.
# "größte" stays as it is.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 xgrammar==0.2.8
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
import re

import xgrammar


def printed(name):
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    first = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), strict_mode=True))
    again = str(xgrammar.Grammar.from_ebnf(first))
    return [re.search(r'root ::= .*?\\"(gr.*?)\\"', text)[1] for text in (first, again)]


found = {name: printed(name) for name in ("gr\u00f6\u00dfe", "gr\u00f6\u00dfte")}
print(found)
assert found["gr\u00f6\u00dfe"] == [r"gr\xf6\xdfe", r"gr\xf6\u0dfe"], found
assert found["gr\u00f6\u00dfte"] == [r"gr\xf6\xdfte"] * 2, found
PYTHON
