"""A request's sampling parameters. The same Struct serves the Python API, the wire and the worker."""

import copy
import math
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.core.wire.field_types import check_types, read_numbers
from quire.core.wire.repetition import RepetitionDetection
from quire.core.wire.sampling_lists import (
    MAX_LOGPROB_TOKEN_IDS,
    check_allowed_token_ids,
    check_bad_words,
    check_extra_args,
    check_id_rows,
    check_logit_bias,
    check_stops,
    check_token_ids,
    is_list_of,
    read_logit_bias,
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


class SamplingParams(Struct, omit_defaults=True):
    """Parameters of one generation request, with vLLM's names, order and defaults; the last fields are Quire's own.

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
    watermarking: Annotated[bool | None, Meta(description="Only None and false: there is no watermark.")] = None
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
    prompt_logprob_token_ids: Annotated[
        list[list[int]] | None,
        Meta(
            description="Token ids to score at each position of the prompt, a list (or row of an array) for each: the "
            "i-th list as predictions of prompt token prompt_logprob_start + i + 1. -1 fills up a row."
        ),
    ] = None
    prompt_logprob_start: Annotated[
        int | None, Meta(description="The position of the first list of prompt_logprob_token_ids; 0 when unset.")
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        Meta(description="Tokens to give log-probabilities of, beside the sampled one, instead of the likeliest."),
    ] = None
    flat_logprobs: Annotated[
        bool, Meta(description="Return log-probabilities as FlatLogprobs: a few long lists instead of many objects.")
    ] = False
    detokenize: Annotated[bool, Meta(description="Turn output ids into text.")] = True
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="Put spaces between special tokens in the text.")
    ] = True
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the stop string at the end of the text.")] = (
        False
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: Annotated[
        int | None,
        Meta(description="Tokens per output of a stream, if more than the server's own; the first comes at once."),
    ] = None
    skip_clone: Annotated[bool, Meta(description="`clone` copies only the outermost object.")] = False
    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="What the output must match: a schema, a pattern, a grammar.")
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None, Meta(description="Added to logits, by token id; -100 to 100 each.")
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, Meta(description="The only tokens that may be sampled; None allows all.")
    ] = None
    extra_args: Annotated[
        dict[str, Any] | None, Meta(description="For logits processors that the server loads; nothing else reads it.")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        Meta(description="Words that are not generated, at the start of a text or after a space."),
    ] = None
    skip_reading_prefix_cache: Annotated[
        bool | None,
        Meta(description="Compute the whole prompt, whatever the prefix cache has. Scores of a prompt imply it."),
    ] = None
    thinking_token_budget: Annotated[
        int | None, Meta(description="Tokens of reasoning after which it is closed; None or -1 leaves it alone.")
    ] = None
    repetition_detection: Annotated[
        RepetitionDetection | None, Meta(description="Ends an output that repeats a pattern of tokens.")
    ] = None
    routed_experts_prompt_start: Annotated[
        int, Meta(description="Only 0: which experts a token went to is not recorded.")
    ] = 0
    trace_decode_token_ids: Annotated[
        list[int] | None, Meta(description="Only None: tokens are sampled, and not replayed.")
    ] = None
    bad_words_token_ids: Annotated[
        list[list[int]] | None,
        Meta(description="The same as token sequences; made from bad_words when a request is accepted."),
    ] = None
    guided_decoding: Annotated[
        StructuredOutputsParams | None, Meta(description="The older name of structured_outputs, which it is moved to.")
    ] = None
    shown_special_token_ids: Annotated[
        list[int] | None, Meta(description="Special tokens that stay in the text when the others are left out.")
    ] = None
    thinking: Annotated[
        ThinkingMarks | None,
        Meta(description="Marks of reasoning, for thinking_token_budget; a server knows them by --reasoning-parser."),
    ] = None

    def __post_init__(self) -> None:
        self._read_loose_values()
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
        self._check_prompt_scores()
        for name, reason in _REFUSED.items():
            if getattr(self, name):
                raise ParameterError(f"{name} is not supported: {reason}", param=name)
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
        check_types(self)

    def _read_loose_values(self) -> None:
        """Accepts further values that vLLM takes: NumPy's numbers, true for one log-probability, and -1 for no seed."""
        read_numbers(self)
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.seed == -1:
            self.seed = None

    def _check_prompt_scores(self) -> None:
        if self.prompt_logprob_token_ids is None:
            if self.prompt_logprob_start is not None:
                raise ParameterError(
                    "prompt_logprob_start needs prompt_logprob_token_ids.", param="prompt_logprob_start"
                )
        else:
            check_id_rows("prompt_logprob_token_ids", self.prompt_logprob_token_ids)
        if self.skip_reading_prefix_cache is False and self.scores_prompt:
            raise ParameterError(
                "prompt_logprobs and prompt_logprob_token_ids need the whole prompt computed, because the prefix cache "
                "keeps no log-probabilities; leave skip_reading_prefix_cache out.",
                param="skip_reading_prefix_cache",
            )

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
        """True if sampled tokens come with log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """True if the prompt's tokens come with log-probabilities."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing, or with `skip_clone` one that shares lists and dictionaries."""
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Parameters of values that may be None where that means the default, as a protocol's body has them.

        `logit_bias` may have its ids as strings, and biases beyond the limits, which are lowered to them.
        """
        for name in ("n", *_NUMBERS):
            if name in values and values[name] is None:
                del values[name]
        if values.get("logit_bias") is not None:
            values["logit_bias"] = read_logit_bias(values["logit_bias"])
        return cls(**values)


GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow."""

MAX_TOKEN_COUNT = 2**31 - 1
MAX_COMPLETIONS = 16384
"""Completions that one request may ask for."""

_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_INTEGERS = (
    *("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("stream_interval", "thinking_token_budget", "prompt_logprob_start"),
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
    ("prompt_logprob_start", 0, MAX_TOKEN_COUNT),
)
_REFUSED = {
    "watermarking": "there is no watermark.",
    "routed_experts_prompt_start": "which experts a token went to is not recorded.",
    "trace_decode_token_ids": "tokens are sampled, and not replayed; score given tokens as a prompt.",
}
