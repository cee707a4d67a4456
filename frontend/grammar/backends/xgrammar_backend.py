"""XGrammar: grammars with precomputed token masks, serialized by `CompiledGrammar.serialize_json`."""

import json
import random
import re
import time
from typing import Any

import numpy as np

from quire.core.light_import import absent, without
from quire.core.wire.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.backends.captured import captured_stderr
from quire.frontend.grammar.backends.text_rules import TextRules
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.normalized import normalize
from quire.frontend.grammar.pattern_notations import plain_regex, rewrite_patterns, write_lengths
from quire.frontend.grammar.schema import walk
from quire.frontend.grammar.structural_tag import formats, is_portable, read_format
from quire.frontend.grammar.unenforced_keywords import is_loose, xgrammar_gap

with absent("torch"):
    import tvm_ffi  # noqa: F401
with without("torch", "transformers"):  # torch is only needed for masks, which the workers make
    import xgrammar

_PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
"""A character of a long string, which needs no escape in JSON. XGrammar would let a negated class match surrogates."""
_TRIAL_STEPS = 48
_TRIAL_SECONDS = 0.5
"""Processor time for all steps of the trial: ten milliseconds a token. Most grammars take ten microseconds a token."""


class XGrammarBackend:
    """Compiles constraints with XGrammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.end_token_ids,
        )
        # One thread, so that a large schema does not take the cores from the engine.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, constraint: Constraint) -> bytes:
        if constraint.whitespace_pattern is not None:
            raise GrammarError("whitespace_pattern is not supported")
        with captured_stderr() as warnings:
            try:
                compiled = self._compile(constraint)
            except (RuntimeError, ValueError, TypeError) as error:
                raise GrammarError(_reason(error)) from None
        ignored = [line for line in warnings() if "not supported" in line or "ignor" in line or "falling back" in line]
        if ignored:
            raise GrammarError(ignored[0].split("Warning: ")[-1].strip()[:300])
        self._try(compiled)
        return compiled.serialize_json().encode()

    def _compile(self, constraint: Constraint) -> Any:
        text = constraint.text
        has_others = len(constraint.backends) > 1
        match constraint.kind:
            case "json":
                schema = json.loads(text)
                texts = _lark_texts([schema])
                schema = _checked(schema, constraint, texts, strict=has_others and not texts)
                written = json.dumps(write_lengths(schema, _PLAIN), ensure_ascii=False)
                options: dict[str, Any] = {
                    "any_whitespace": constraint.any_whitespace,
                    "max_whitespace_cnt": constraint.max_whitespace,
                    "strict_mode": False,
                }
                if texts:
                    rules = xgrammar.Grammar.from_json_schema(written, **options)
                    return self._compiler.compile_grammar(texts.put_into(_printed(rules)))
                return self._compiler.compile_json_schema(written, **options)
            case "json_object":
                return self._compiler.compile_json_schema(
                    '{"type": "object"}',
                    any_whitespace=constraint.any_whitespace,
                    max_whitespace_cnt=constraint.max_whitespace,
                    strict_mode=False,
                )
            case "regex":
                _check_regex(text, strict=has_others)
                return self._compiler.compile_regex(text)
            case "choice":
                return self._compiler.compile_grammar(_choice_grammar(json.loads(text)))
            case "grammar":
                return self._compiler.compile_grammar(text) if "::=" in text else self._compiler.compile_lark(text)
            case "structural_tag":
                tag, texts = _structural_tag(constraint)
                if texts:
                    rules = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
                    return self._compiler.compile_grammar(texts.put_into(_printed(rules)))
                return self._compiler.compile_structural_tag(json.dumps(tag))

    def _try(self, compiled: Any) -> None:
        """Samples a few random tokens, to find here, and not in a worker, a grammar that allows nothing or is slow.

        Raises:
            GrammarError: the grammar allows no token, or the trial takes more than `_TRIAL_SECONDS`.
        """
        matcher = xgrammar.GrammarMatcher(compiled)
        vocab_size = len(self._vocabulary.tokens)
        bitmask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        choose = random.Random(0).choice
        limit = time.thread_time() + _TRIAL_SECONDS
        for _ in range(_TRIAL_STEPS):
            matcher.fill_next_token_bitmask(bitmask, 0)
            allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:vocab_size])
            if not len(allowed):
                raise GrammarError("it allows no output")
            if time.thread_time() > limit:
                raise GrammarError("its masks take too long to compute")
            if not matcher.accept_token(int(choose(allowed))) or matcher.is_terminated():
                return


def _choice_grammar(choices: list[str]) -> str:
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _literal(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return "\\" + character
    return f"\\u{code:04x}" if code < 0x20 or code == 0x7F else character


_ESCAPES = re.compile(r"\\(?:x([0-9a-f]{2})|.)")


def _printed(grammar: Any) -> str:
    """Returns the rules as text that XGrammar reads as the same rules.

    It prints ß as `\\xdf`, and reads the hexadecimal digits of the next characters as part of that escape: "ße" would
    become U+0DFE. `\\u` takes four digits.
    """
    return _ESCAPES.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], str(grammar))


def _checked(schema: Any, constraint: Constraint, texts: TextRules, *, strict: bool) -> Any:
    """The normalized schema, without the strings that `texts` takes; `strict` as for `xgrammar_gap`.

    Raises:
        GrammarError: XGrammar does not enforce a keyword of the schema.
    """
    schema = normalize(schema, closed=constraint.closed)
    if (gap := xgrammar_gap(schema, strict=strict)) is not None:
        raise GrammarError(f"{gap} is not supported as it is used here")
    texts.take_strings(schema)
    return rewrite_patterns(schema, plain_regex)


def _check_regex(pattern: str, *, strict: bool) -> None:
    if strict and is_loose(pattern):
        raise GrammarError("negated classes and dots would match surrogates")


def _lark_texts(schemas: list[Any]) -> TextRules:
    """Takes the strings with Lark grammars out of the schemas."""
    texts = TextRules(lambda definition: _printed(xgrammar.Grammar.from_lark(definition)))
    for schema in schemas:
        texts.take_lark(schema)
    return texts


def _structural_tag(constraint: Constraint) -> tuple[dict[str, Any], TextRules]:
    """The tag, with its schemas checked and rewritten as schemas outside of tags are, and without its Lark grammars."""
    form = read_format(json.loads(constraint.text))
    texts = _lark_texts([each["json_schema"] for each in formats(form) if "json_schema" in each])
    strict = len(constraint.backends) > 1 and is_portable(form) and not texts
    for each in formats(form):
        if each["type"] == "regex":
            _check_regex(each["pattern"], strict=strict)
        elif each["type"] == "grammar" and "::=" not in each["grammar"]:
            each["grammar"] = _printed(xgrammar.Grammar.from_lark(each["grammar"]))
        elif "json_schema" in each:
            schema = _checked(each["json_schema"], constraint, texts, strict=strict)
            if constraint.max_whitespace is not None and constraint.any_whitespace:
                each.setdefault("max_whitespace_cnt", constraint.max_whitespace)
            is_json = each["type"] == "json_schema" and each.get("style", "json") == "json"
            if not is_json or each.get("excludes"):
                each["json_schema"] = schema
            elif constraint.any_whitespace:
                each["json_schema"] = _open(write_lengths(schema, _PLAIN))
            else:
                _write_in_one_line(each, write_lengths(schema, _PLAIN))
    return {"type": "structural_tag", "format": form}, texts


def _open(schema: Any) -> Any:
    """The schema, with explicitly open objects: in a tag, objects are closed by default."""
    for node in walk(schema):
        if isinstance(node, dict) and (node.get("type") == "object" or "properties" in node):
            node.setdefault("additionalProperties", True)
    return schema


def _write_in_one_line(form: dict[str, Any], schema: Any) -> None:
    """Turns a JSON format into a grammar, because XGrammar can forbid whitespace only for a schema outside of tags."""
    others = {name: value for name, value in form.items() if name not in ("type", "json_schema", "style") and value}
    if others:
        raise GrammarError(f"{next(iter(others))} does not go with disable_any_whitespace")
    text = json.dumps(schema, ensure_ascii=False)
    grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=False, strict_mode=False)
    form.clear()
    form |= {"type": "grammar", "grammar": _printed(grammar)}


def _reason(error: Exception) -> str:
    """The library's own message, without the place in its source. A message about Lark is followed by the grammar."""
    lines = str(error).strip().split("\n")
    line = lines[0] if lines[0].startswith("Lark error") else lines[-1]
    head, _, rest = line.partition(".cc:")
    text = rest.partition(": ")[2] if rest else head
    return (text or type(error).__name__).strip().rstrip(".")[:300]
