"""Grammars for whole answers: the model's reasoning, then the client's format or the calls that it requires."""

import functools
import re
from collections.abc import Callable
from typing import Any

import msgspec

from quire.core.config.reasoning import ReasoningConfig
from quire.core.wire.sampling_params import SamplingParams
from quire.core.wire.structured_outputs import CONSTRAINT_KINDS, StructuredOutputsParams
from quire.frontend.grammar.structural_tag import read_format
from quire.frontend.parsing.answers.parsers import CallConstraint, OutputParsers, ReasoningMarks
from quire.frontend.parsing.formats.checkpoint_marks import read_marks
from quire.frontend.text.tokenizer import Tokenizer

_END_TOKENS = 64
"""Tokens at a prompt's end that are searched for a mark of reasoning."""


def of_calls(constraint: CallConstraint) -> StructuredOutputsParams:
    """The constraint that makes an answer consist of calls."""
    if constraint.structural_tag is not None:
        return StructuredOutputsParams(structural_tag=constraint.structural_tag)
    return StructuredOutputsParams(json=constraint.json_schema)


def or_calls(asked: StructuredOutputsParams, calls: dict[str, Any]) -> StructuredOutputsParams:
    """The constraint that makes an answer either follow the client's format or consist of calls.

    Args:
        calls: the calls as a structural tag.
    """
    form = _format(asked)
    if form is None:
        return asked
    return _as_tag(asked, {"type": "or", "elements": [calls["format"], form]})


def after_reasoning(asked: StructuredOutputsParams, marks: ReasoningMarks | None) -> StructuredOutputsParams:
    """The same constraint, applied from the end of the reasoning on; the reasoning stays free.

    Args:
        marks: None when no marks enclose the model's reasoning: the constraint then holds from the first token.
    """
    form = _format(asked)
    if marks is None or form is None:
        return asked
    thought = {"type": "tag", "begin": marks.begin or "", "content": {"type": "any_text"}, "end": marks.end}
    gap = {"type": "regex", "pattern": r"\s{0,4}"}
    whole: dict[str, Any] = {"type": "sequence", "elements": [thought, gap, form]}
    if marks.begin is not None:  # reasoning is optional
        whole = {"type": "or", "elements": [whole, form]}
    return _as_tag(asked, whole)


class ConstraintsAfterReasoning:
    """Lets the constraints of requests begin after the model's reasoning.

    Args:
        parsers: know the marks of reasoning.
        decode: the text of token ids, special tokens included.
    """

    def __init__(self, parsers: OutputParsers, decode: Callable[[list[int]], str]) -> None:
        self._parsers = parsers
        self._decode = decode

    @classmethod
    def from_options(cls, options: ReasoningConfig, tokenizer: Tokenizer) -> "ConstraintsAfterReasoning":
        """For the reasoning parser that the options name.

        Raises:
            ConfigError: there is no parser of that name, or a plugin cannot be loaded.
        """
        parsers = OutputParsers(
            None,
            options.parser_name,
            reasoning_plugin=options.reasoning_parser_plugin,
            checkpoint=read_marks(tokenizer),
        )
        return cls(parsers, functools.partial(tokenizer.decode, skip_special_tokens=False))

    def apply(self, sampling: SamplingParams, prompt: str | None, token_ids: list[int]) -> SamplingParams:
        """The same parameters, with the constraint that holds for the whole output.

        Args:
            prompt: its text, if it came as text; its end may have opened the reasoning.
            token_ids: of the prompt.
        """
        asked = sampling.structured_outputs
        if asked is None:
            return sampling
        end = prompt if prompt is not None else self._decode(token_ids[-_END_TOKENS:])
        return sampling.replace(structured_outputs=after_reasoning(asked, self._parsers.reasoning_marks(end)))


def _as_tag(asked: StructuredOutputsParams, form: dict[str, Any]) -> StructuredOutputsParams:
    """The format as a structural tag, with the options of `asked`."""
    tag = {"type": "structural_tag", "format": form}
    return msgspec.structs.replace(asked, **{**dict.fromkeys(CONSTRAINT_KINDS), "structural_tag": tag})


def _format(asked: StructuredOutputsParams) -> dict[str, Any] | None:
    """The constraint as a part of a structural tag; None if it is malformed, which the compiler reports."""
    try:
        return _read_format(asked)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError, KeyError, TypeError, AttributeError):
        return None


def _read_format(asked: StructuredOutputsParams) -> dict[str, Any]:
    match asked.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _decoded(asked.json)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": asked.regex}
        case "grammar":
            return {"type": "grammar", "grammar": asked.grammar}
        case "choice":
            return {"type": "regex", "pattern": "|".join(map(re.escape, asked.choice or ()))}
        case "structural_tag":
            return read_format(_decoded(asked.structural_tag))


def _decoded(given: Any) -> Any:
    """A value that a client may also send as JSON text."""
    return msgspec.json.decode(given) if isinstance(given, str) else given
