"""Fields of vLLM's and OpenAI's requests that are refused or have no effect, each with the reason."""

from typing import Any, NamedTuple

HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "session_id"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
"""Fields about billing, storage, routing and speed: accepted, and without effect on the answer.

`session_id` names a conversation across requests: in vLLM it marks KV-cache events for routers in front of several
servers. Quire sends no such events; requests of one conversation find their pages by content.
"""


class RefusedField(NamedTuple):
    """The reason why a field is refused, and its accepted values, which ask for nothing."""

    reason: str
    nothing: tuple[Any, ...] = ()


_NO_MEDIA = "this server takes and gives text only"
_NO_TRANSFER = "KV caches and encoder outputs are not passed between servers"
_NO_EXPERTS = "which experts a token went to is not recorded"

UNSUPPORTED: dict[str, RefusedField] = {
    "audio": RefusedField(_NO_MEDIA),
    "best_of": RefusedField("it was dropped from the API; ask for n and choose by logprobs", (1,)),
    "ec_transfer_params": RefusedField(_NO_TRANSFER),
    "function_call": RefusedField("it is the older name of tool_choice", ("none",)),
    "functions": RefusedField("it is the older name of tools", ([],)),
    "kv_transfer_params": RefusedField(_NO_TRANSFER),
    "mm_payload": RefusedField(_NO_MEDIA, ("tensors",)),
    "modalities": RefusedField(_NO_MEDIA, (["text"],)),
    "return_mm_kwargs": RefusedField(_NO_MEDIA, (False,)),
    "return_prompt_text": RefusedField("the prompt's text comes from the render endpoints", (False,)),
    "return_token_offsets": RefusedField("offsets come from the render endpoints, not with an answer", (False,)),
    "routed_experts_prompt_start": RefusedField(_NO_EXPERTS, (0,)),
    "watermarking": RefusedField("no watermark is configured here", (False,)),
    "web_search_options": RefusedField("this server does not search; offer a tool that does"),
}
"""RefusedField fields by name."""


def is_usual_verbosity(verbosity: Any) -> bool:
    """Returns True if the value asks for nothing. Other values are ignored in plain sight: models here have no such
    setting."""
    return verbosity in (None, "medium")
