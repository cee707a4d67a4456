"""Beam search over HTTP: its parameters in a body, and the fields that contradict it."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError

_NOTHING: dict[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "vllm_xargs": ({},),
    "truncate_prompt_tokens": (),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
}
"""Fields that shape one sampled sequence and so contradict a beam search, and their values without effect."""


def refuse_with_beams(body: Struct) -> None:
    """Refuses the fields of a body that contradict `use_beam_search`.

    Raises:
        ParameterError: the field, by name.
    """
    for name, nothing in _NOTHING.items():
        if name in body.__struct_fields__:
            value = getattr(body, name)
            if value is not None and value not in nothing:
                raise ParameterError(f"{name} does not go with use_beam_search; leave one out.", param=name)
