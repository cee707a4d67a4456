"""Reads or refuses the fields of request bodies that mean the same in every protocol."""

import functools
from typing import Any, Protocol

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.sampling_lists import check_extra_args
from quire.core.wire.sampling_params import RequestOutputKind
from quire.frontend.media.settings import Overrides
from quire.frontend.refusals.fields import UNSUPPORTED

SAMPLING_FIELDS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "logprob_token_ids", "repetition_detection", "stream_interval", "thinking_token_budget"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
)


OTHER_SAMPLING_FIELDS = ("logit_bias", "vllm_xargs", "stream")
"""Sampling fields whose form differs from that of SamplingParams."""


@functools.cache
def _refused_fields(kind: type[Struct]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name in UNSUPPORTED]


@functools.cache
def _readable_fields(kind: type[Struct]) -> list[str]:
    return [name for name in (*SAMPLING_FIELDS, *OTHER_SAMPLING_FIELDS) if name in kind.__struct_fields__]


def refuse_unsupported(body: Struct) -> None:
    """Refuses fields that this server cannot honour, unless they ask for nothing.

    Raises:
        ParameterError: the field, by name.
    """
    for name in _refused_fields(type(body)):
        value = getattr(body, name)
        if value is not None and value not in UNSUPPORTED[name].nothing:
            raise ParameterError(f"{name} is refused: {UNSUPPORTED[name].reason}.", param=name)


def read_sampling(body: Struct) -> dict[str, Any]:
    """A body's sampling fields as SamplingParams keywords, without lengths, log-probabilities and formats.

    Raises:
        ParameterError: a value that its field does not allow.
    """
    given = {name: value for name in _readable_fields(type(body)) if (value := getattr(body, name)) is not None}
    kind = RequestOutputKind.DELTA if given.pop("stream", False) else RequestOutputKind.FINAL_ONLY
    if "logit_bias" in given:
        given["logit_bias"] = _ids_as_numbers(given["logit_bias"])
    if extra_args := given.pop("vllm_xargs", None):
        check_extra_args(extra_args, "vllm_xargs")
        given["extra_args"] = extra_args
    return {**given, "output_kind": kind}


class MediaFields(Protocol):
    """A body with a request's own settings of images, videos and sounds, for servers with --trust-request-mm-kwargs."""

    @property
    def mm_processor_kwargs(self) -> Any: ...
    @property
    def media_io_kwargs(self) -> Any: ...


def read_overrides(body: MediaFields) -> Overrides:
    """A body's settings of images, videos and sounds. Raises ParameterError for what is no such setting."""
    return Overrides.read(body.mm_processor_kwargs, body.media_io_kwargs)


def _ids_as_numbers(logit_bias: dict[str, float]) -> dict[int, float]:
    """`logit_bias` with integer keys, because JSON's keys are strings."""
    wrong = [key for key in logit_bias if not (len(key) < 16 and key.isascii() and key.isdigit())]
    if wrong:
        shown = ", ".join(repr(key[:16]) for key in wrong[:8])
        raise ParameterError(f"logit_bias must map token ids to numbers; no ids: {shown}.", param="logit_bias")
    return {int(token_id): bias for token_id, bias in logit_bias.items()}
