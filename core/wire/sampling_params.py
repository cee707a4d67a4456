"""A request's sampling parameters. The same Struct serves the Python API, the wire and the worker."""

import math
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.core.wire.repetition import RepetitionDetection
from quire.core.wire.sampling_lists import (
    MAX_LOGPROB_TOKEN_IDS,
    check_allowed_token_ids,
    check_bad_words,
    check_extra_args,
    check_logit_bias,
    check_stops,
    check_token_ids,
    is_list_of,
)
from quire.core.wire.structured_outputs import StructuredOutputsParams


class RequestOutputKind(IntEnum):
    """The content of each `RequestOutput` of a stream: all output so far, only the new part, or one final output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ThinkingMarks(Struct, kw_only=True):
    """The token sequences that mark the reasoning in a request's output.

    Raises:
        ParameterError: there is no end mark, or a sequence is empty.
    """

    begin: list[list[int]]
    end: list[list[int]]  # the first is inserted where reasoning has to end
    opened: bool = False  # the prompt ends within reasoning

    def __post_init__(self) -> None:
        if not self.end or not all(self.begin + self.end):
            raise ParameterError("thinking needs an end, and no empty marks.", param="thinking")

    @property
    def longest(self) -> int:
        """The number of tokens of the longest mark."""
        return max(map(len, self.begin + self.end))


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """Parameters of one generation request, with vLLM's names and defaults.

    Raises:
        ParameterError: a value is out of its range; `param` names the field.
    """

    n: Annotated[int, Meta(description="How many completions to generate for the prompt.")] = 1
    presence_penalty: Annotated[
        float, Meta(description="Subtracted once from every token already generated; -2 to 2.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(description="Subtracted per occurrence in the output so far; -2 to 2.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Meta(description="Divides positive and multiplies negative logits of tokens seen in prompt or output; > 0."),
    ] = 1.0
    temperature: Annotated[float, Meta(description="0 is greedy; larger is more random.")] = 1.0
    top_p: Annotated[
        float, Meta(description="Keep the smallest set of tokens whose probability reaches top_p; (0, 1].")
    ] = 1.0
    top_k: Annotated[int, Meta(description="Keep the k likeliest tokens; 0 or -1 keeps all.")] = 0
    min_p: Annotated[float, Meta(description="Drop tokens less likely than min_p times the likeliest; [0, 1].")] = 0.0
    seed: Annotated[int | None, Meta(description="Makes sampling repeatable; None draws a seed at admission.")] = None
    stop: Annotated[str | list[str] | None, Meta(description="Strings that end the output.")] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Token ids that end the output.")] = None
    ignore_eos: Annotated[bool, Meta(description="Go on past the end-of-sequence token.")] = False
    max_tokens: Annotated[
        int | None, Meta(description="Most tokens to generate; None means up to the context limit.")
    ] = 16
    min_tokens: Annotated[int, Meta(description="Tokens before which neither EOS nor a stop token is sampled.")] = 0
    logprobs: Annotated[
        int | None,
        Meta(description="Log-probabilities per output token: the sampled one and this many of the likeliest."),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Meta(description="Log-probabilities per prompt token: its own and this many of the likeliest; -1 for all."),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        Meta(description="Tokens to give log-probabilities of, beside the sampled one, instead of the likeliest."),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None, Meta(description="Added to logits, by token id; -100 to 100 each.")
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, Meta(description="The only tokens that may be sampled; None allows all.")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        Meta(description="Words that are not generated, at the start of a text or after a space."),
    ] = None
    bad_words_token_ids: Annotated[
        list[list[int]] | None,
        Meta(description="The same as token sequences; made from bad_words when a request is accepted."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="What the output must match: a schema, a pattern, a grammar.")
    ] = None
    guided_decoding: Annotated[
        StructuredOutputsParams | None, Meta(description="The older name of structured_outputs, which it is moved to.")
    ] = None
    detokenize: Annotated[bool, Meta(description="Turn output ids into text.")] = True
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    shown_special_token_ids: Annotated[
        list[int] | None, Meta(description="Special tokens that stay in the text when the others are left out.")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="Put spaces between special tokens in the text.")
    ] = True
    repetition_detection: Annotated[
        RepetitionDetection | None, Meta(description="Ends an output that repeats a pattern of tokens.")
    ] = None
    thinking_token_budget: Annotated[
        int | None, Meta(description="Tokens of reasoning after which it is closed; None or -1 leaves it alone.")
    ] = None
    thinking: Annotated[
        ThinkingMarks | None,
        Meta(description="Marks of reasoning, for thinking_token_budget; a server knows them by --reasoning-parser."),
    ] = None
    stream_interval: Annotated[
        int | None,
        Meta(description="Tokens per output of a stream, if more than the server's own; the first comes at once."),
    ] = None
    extra_args: Annotated[
        dict[str, Any] | None, Meta(description="For logits processors that the server loads; nothing else reads it.")
    ] = None
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the stop string at the end of the text.")] = (
        False
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ParameterError(f"{name} must be a finite number, got {value!r}.", param=name)
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ParameterError(f"{name} must be a whole number, got {value!r}.", param=name)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise ParameterError(f"{name} must be {allowed}, got {value}.", param=name)
        if self.top_p <= 0:
            raise ParameterError(f"top_p must be above 0, got {self.top_p}; use 1 to keep all tokens.", param="top_p")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ParameterError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        check_stops(self.stop_strings)
        if not is_list_of(int, self.stop_token_ids or ()):
            raise ParameterError("stop_token_ids must be a list of token ids.", param="stop_token_ids")
        if self.stop_strings and not self.detokenize:
            raise ParameterError("stop strings need detokenize=True; use stop_token_ids instead.", param="stop")
        if self.logprob_token_ids is not None:
            check_token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            if self.logprobs is not None and self.logprobs != len(self.logprob_token_ids):
                raise ParameterError(
                    f"logprobs ({self.logprobs}) and logprob_token_ids ({len(self.logprob_token_ids)} ids) disagree; "
                    "leave logprobs out.",
                    param="logprob_token_ids",
                )
        if self.repetition_detection is not None and not isinstance(self.repetition_detection, RepetitionDetection):
            raise ParameterError("repetition_detection must be a RepetitionDetection.", param="repetition_detection")
        if self.extra_args is not None:
            check_extra_args(self.extra_args)
        if self.guided_decoding is not None:
            self._rename_guided_decoding()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ParameterError(
                "structured_outputs must be StructuredOutputsParams, for example StructuredOutputsParams(json=schema).",
                param="structured_outputs",
            )
        if self.logit_bias is not None:
            check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            check_allowed_token_ids(self.allowed_token_ids)
        if self.bad_words is not None:
            check_bad_words(self.bad_words)

    def _rename_guided_decoding(self) -> None:
        if self.structured_outputs is not None:
            raise ParameterError(
                "guided_decoding is the older name of structured_outputs; give one of them.", param="guided_decoding"
            )
        self.structured_outputs, self.guided_decoding = self.guided_decoding, None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, whichever way it was given."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_logprobs(self) -> bool:
        """Whether sampled tokens come with log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)


GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow."""

MAX_TOKEN_COUNT = 2**31 - 1
MAX_COMPLETIONS = 16384
"""Completions that one request may ask for."""

_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_INTEGERS = (
    *("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("stream_interval", "thinking_token_budget"),
)
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_COMPLETIONS),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-6, 1e6),  # beyond, logits in 32 bits overflow
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("top_k", -1, MAX_TOKEN_COUNT),
    ("seed", -(2**63), 2**64 - 1),
    ("max_tokens", 1, MAX_TOKEN_COUNT),
    ("min_tokens", 0, MAX_TOKEN_COUNT),
    ("logprobs", -1, MAX_TOKEN_COUNT),
    ("prompt_logprobs", -1, MAX_TOKEN_COUNT),
    ("stream_interval", 1, MAX_TOKEN_COUNT),
    ("thinking_token_budget", -1, MAX_TOKEN_COUNT),
)
