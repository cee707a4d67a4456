"""Bodies of the other routes of responses: counting, compacting, and conversations that the server stores."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.frontend.chat.partly_read import PartlyRead
from quire.frontend.openai.responses.schema import (
    ConversationReference,
    PromptCacheOptions,
    Reasoning,
    ResponsesRequest,
    TextConfig,
)


class _PromptRequest(PartlyRead, forbid_unknown_fields=True, kw_only=True):
    """The fields of a response that become its prompt."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_response(self) -> ResponsesRequest:
        """The request for a response that has this prompt."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return ResponsesRequest(**given)

    def ignored_parts(self) -> Iterator[str]:
        """Yields the tools and items that a server would run."""
        yield from self.as_response().ignored_parts()


class InputTokensRequest(_PromptRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses/input_tokens."""

    conversation: str | ConversationReference | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class CompactRequest(_PromptRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses/compact. The tools are the conversation's; the model calls none of them."""

    max_output_tokens: int | None = None  # of the summary; OpenAI's API has no such field
    priority: int | None = None
    cache_salt: str | None = None
    # Without effect on a private server.
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None

    def as_response(self) -> ResponsesRequest:
        """The request for a response that has this prompt."""
        request = super().as_response()
        return msgspec.structs.replace(request, service_tier=None, tool_choice="none" if self.tools else None)


class ConversationUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None


class ItemsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]]


class ConversationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None
