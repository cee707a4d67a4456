"""Shortens a conversation: keeps its messages, and replaces everything else with a summary by the served model."""

import time
import uuid
from typing import Any

import msgspec

from quire.core.errors import EngineError, ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.openai.responses.answers import Compaction
from quire.frontend.openai.responses.bodies import CompactRequest
from quire.frontend.openai.responses.item_page import with_unique_ids
from quire.frontend.openai.responses.items import encrypt, joined
from quire.frontend.openai.responses.request_input import RequestReader
from quire.frontend.openai.responses.schema import NAMES
from quire.frontend.openai.responses.streaming_events import response_usage
from quire.frontend.parsing.events import Finish, TextDelta, Usage

MAX_SUMMARY_TOKENS = 4096
"""Most tokens of a summary and the reasoning before it, for a request without a limit."""

PROMPT = (
    "Write a summary of this conversation for someone who continues it and cannot read it. Tell what was asked for, "
    "what was decided and why, the facts, names, numbers and results that are still needed, and what is left to do. "
    "Write the summary and nothing else."
)

_KEPT_ROLES = ("user", "system", "developer")


class Compactions:
    """Answers POST /v1/responses/compact."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations, reader: RequestReader) -> None:
        self._engine = engine
        self._conversations = conversations
        self._reader = reader

    async def compact(self, request: CompactRequest, headers: ClientHeaders = ClientHeaders()) -> Compaction:
        """The conversation in short: all messages but the assistant's, then an item with the model's summary.

        Raises:
            RequestError: the conversation cannot be read, or the model wrote no summary within the limit.
            EngineError: the engine failed.
        """
        response = request.as_response()
        limit = MAX_SUMMARY_TOKENS if request.max_output_tokens is None else request.max_output_tokens
        response.check()
        self._engine.model.choose(request.model)
        with renamed(**NAMES):
            read = await self._reader.read(response)
            if not read.previous and not read.items:
                raise ParameterError("input must not be empty: there is nothing to compact.", param="input")
            chat = msgspec.structs.replace(
                read.chat,
                messages=joined([*read.chat.messages, {"role": "user", "content": PROMPT}]),
                max_tokens=limit,
                lowers_max_tokens=True,
            )
            turn = await self._conversations.open(chat, f"resp_{uuid.uuid4().hex}", headers)
        summary: list[str] = []
        try:
            async for _, events in turn.events():
                for event in events:
                    match event:
                        case TextDelta():
                            summary.append(event.text)
                        case Finish("abort" | "error"):
                            raise EngineError("The summary was ended by the server.")
                        case Usage():
                            usage = response_usage(event)
        finally:
            turn.close()
        text = "".join(summary).strip()
        if not text:
            raise ParameterError(
                f"The model wrote no summary within max_output_tokens = {limit}; raise it.", param="max_output_tokens"
            )
        kept = [item for item in read.previous + read.items if _is_kept(item)]
        compacted = {"type": "compaction", "encrypted_content": encrypt(text)}
        return Compaction(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            output=with_unique_ids([*kept, compacted]),
            usage=usage,
        )


def _is_kept(item: dict[str, Any]) -> bool:
    return item.get("type", "message") == "message" and item.get("role") in _KEPT_ROLES
