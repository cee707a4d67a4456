"""The fields that all answers begin with."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.openai.answers import CompletionUsage
from quire.frontend.outputs import PoolingRequestOutput
from quire.frontend.pooling.encoding import Caller
from quire.frontend.pooling.fields import PooledBody


class Reply(Struct, frozen=True):
    """The id, the model's name and the time of one answer."""

    id: str
    model: str
    created: int


def begin(engine: AsyncLLM, request: PooledBody, headers: ClientHeaders, prefix: str) -> Reply:
    """The reply to a request, whose fields are checked.

    Raises:
        RequestError: a field is wrong, or another model is asked for.
    """
    engine.model.choose(request.model)
    request.check()
    return Reply(f"{prefix}-{headers.choose_id(request.request_id)}", engine.model.chosen_name, int(time.time()))


def usage(outputs: Sequence[PoolingRequestOutput]) -> CompletionUsage:
    """The tokens of all prompts."""
    total = sum(len(output.prompt_token_ids) for output in outputs)
    return CompletionUsage(prompt_tokens=total, total_tokens=total)


def bytes_facts(reply: Reply, counted: CompletionUsage) -> dict[str, Any]:
    """The fields of an answer in bytes besides the vectors."""
    tokens = {"prompt_tokens": counted.prompt_tokens, "total_tokens": counted.total_tokens}
    return {"id": reply.id, "created": reply.created, "model": reply.model, "usage": tokens}


def caller_of(request: PooledBody, reply: Reply, headers: ClientHeaders) -> Caller:
    """The part of a request that all its prompts share."""
    return Caller(
        reply_id=reply.id,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        data_parallel_rank=headers.data_parallel_rank,
    )


def plain(value: Any) -> Any:
    """An object of a plugin in types that JSON has; pydantic's models, arrays and tensors are objects and lists."""
    return msgspec.to_builtins(value, enc_hook=_plain_object)


def _plain_object(value: Any) -> Any:
    for method, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        if callable(made := getattr(value, method, None)):
            return made(**options)
    raise NotImplementedError(f"The plugin's answer holds {type(value).__name__}, which JSON has not.")
