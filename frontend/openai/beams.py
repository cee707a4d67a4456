"""Beam search over HTTP: which fields go with it, and how a request becomes one."""

from collections.abc import Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.schema import GenerationRequest
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.beam_search import BeamSearch
from quire.frontend.requests.prompt import PromptLike

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
}
"""Fields that shape one sampled sequence and so contradict a beam search, and the values that ask for nothing."""


async def open_beams(
    engine: AsyncLLM,
    request: GenerationRequest,
    prompt: PromptLike,
    request_id: str,
    *,
    max_tokens: int,
    tells_logprobs: bool,
    shown_special_token_ids: Sequence[int] = (),
) -> BeamSearch:
    """The search that `request` asks for with `use_beam_search`.

    Raises:
        ParameterError: a field that does not go with it, or a prompt or parameter that is wrong.
    """
    for name, nothing in _NOTHING.items():
        if name in request.__struct_fields__:
            value = getattr(request, name)
            if value is not None and value not in nothing:
                raise ParameterError(f"{name} does not go with use_beam_search; leave one out.", param=name)
    try:
        params = BeamSearchParams(
            beam_width=request.n or 1,
            max_tokens=max_tokens,
            ignore_eos=bool(request.ignore_eos),
            temperature=request.temperature or 0.0,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            early_stopping=request.early_stopping or False,
            stop_token_ids=request.stop_token_ids or [],
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            shown_special_token_ids=list(shown_special_token_ids),
        )
    except ParameterError as error:
        raise ParameterError(str(error), param="n" if error.param == "beam_width" else error.param) from None
    return await engine.open_beams(
        prompt,
        params,
        request_id,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        tells_logprobs=tells_logprobs,
        add_special_tokens=request.add_special_tokens is not False,
    )
