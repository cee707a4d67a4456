"""Makes responses: reads the model's answer to its end, in the foreground or in the background."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quire.core.errors import OverloadedError, QuireError, RequestError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.turn import Turn
from quire.frontend.http.errors import describe
from quire.frontend.http.server_state import ServerState
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.responses.answers import RawMessage
from quire.frontend.openai.responses.builder import ResponseBuilder
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.store import ResponseStore, StoredResponse
from quire.frontend.outputs import CompletionOutput
from quire.frontend.requests.prompt import Prompt

logger = get_logger(__name__)


class Job:
    """A response that is being made.

    Args:
        items: those that the client sent with the request.
        prompt: what the model reads.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        builder: ResponseBuilder,
        turn: Turn,
        stored: StoredResponse,
        items: list[dict[str, Any]],
        prompt: Prompt,
    ) -> None:
        self.request = request
        self.builder = builder
        self.turn = turn
        self.stored = stored
        self.items = items
        self.prompt = prompt
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def note(self, output: CompletionOutput) -> None:
        """Keeps an output as it is, for a request that asks for it and may see all of it."""
        if self.request.enable_response_messages and self.turn.tells_tokens:
            self._texts.append(output.text)
            self._token_ids += output.token_ids

    def tell_messages(self) -> None:
        """Adds to the response what the model read and wrote, if the request asks for it."""
        if self.request.enable_response_messages:
            response, text = self.builder.response, "".join(self._texts)
            response.input_messages = [RawMessage(message=self.prompt.text or "", tokens=self.prompt.token_ids)]
            response.output_messages = [RawMessage(message=text, tokens=self._token_ids)] if self._token_ids else []


class Jobs:
    """Makes responses, and keeps those that are finished.

    Args:
        tokens_as_ids: log-probabilities name tokens by their ids.
        state: runs what is made in the background, so that a stopping server waits for it.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        store: ResponseStore,
        kept: KeptConversations,
        state: ServerState,
        *,
        tokens_as_ids: bool,
    ) -> None:
        self._engine = engine
        self._store = store
        self._kept = kept
        self._state = state
        self._tokens_as_ids = tokens_as_ids

    async def run(self, job: Job) -> AsyncGenerator[list[bytes], None]:
        """Reads the turn to its end; yields the frames of its stream, those of one output together."""
        builder, request = job.builder, job.request
        formatter = LogprobFormatter(self._engine.tokenizer, request.top_logprobs or 0, as_ids=self._tokens_as_ids)
        started = failed = False
        try:
            async for output, events in job.turn.events():
                if not started:
                    yield builder.start()
                    started = True
                logprobs = formatter.chat(output.logprobs).content if output.logprobs else ()
                job.note(output)
                if frames := builder.add(events, logprobs):
                    yield frames
        except Exception as error:  # also from the parsers of users
            if not request.background and not (request.stream and started):
                raise  # nothing is sent yet: the error gets its own HTTP status
            failed = True
            logger.warning(
                "response %s failed: %s", builder.response.id, error, exc_info=not isinstance(error, QuireError)
            )
            yield ([] if started else builder.start()) + builder.fail(_failure_code(error), describe(error).message)
        finally:
            job.turn.close()
        job.tell_messages()
        self._keep(job)
        if not failed:
            yield [builder.end()]

    def start(self, job: Job) -> None:
        """Makes the response in the background."""
        job.builder.response.status = "queued"
        job.stored.task = self._state.start(self._record(job))
        self._store.put(job.stored)

    def _keep(self, job: Job) -> None:
        response = job.builder.response
        output = msgspec.to_builtins(response.output)
        if job.request.is_stored and self._store.keeps_any:
            job.stored.items = job.stored.items + output
            self._store.put(job.stored)
        if response.conversation is not None and response.status in ("completed", "incomplete"):
            self._kept.extend(response.conversation.id, job.items + output)

    async def _record(self, job: Job) -> None:
        response, history = job.builder.response, job.stored.history
        groups = self.run(job)
        try:
            async for frames in groups:
                if history is not None:
                    history.add(frames)
        except asyncio.CancelledError:
            if response.status != "cancelled":
                job.builder.fail("server_error", "The server was stopped.")
            raise
        finally:
            await groups.aclose()
            if history is not None:
                history.end()


def _failure_code(error: Exception) -> str:
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"
