"""The routes of the Responses API."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from litestar import delete, get, post
from litestar.params import Parameter
from litestar.types import ASGIApp

from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.rendered import RenderedRequest
from quire.frontend.http.answers import HttpAnswers, documented, json_answer
from quire.frontend.http.errors import Problem
from quire.frontend.http.event_stream import Accepted, event_frame
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.openai.responses.answers import Compaction, DeletedResponse, InputTokenCount, Response
from quire.frontend.openai.responses.bodies import CompactRequest, InputTokensRequest
from quire.frontend.openai.responses.compaction import Compactions
from quire.frontend.openai.responses.item_page import ItemPage
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.service import Opening, Responses

_encode = msgspec.json.Encoder().encode


class _Numbered:
    """A stream that counts its events, so that an error event at its end has a sequence number too.

    An error event ends a stream from outside, as when the server stops. A failed response has a different last event.

    Args:
        first: number of the first event.
    """

    def __init__(self, groups: AsyncGenerator[list[bytes], None], first: int = 0) -> None:
        self._groups = groups
        self._number = first

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream, with the events of each list joined into one frame."""
        async with aclosing(self._groups) as groups:
            async for events in groups:
                self._number += len(events)
                yield Accepted(b"".join(events)) if isinstance(events, Opening) else b"".join(events)

    def error_frame(self, problem: Problem) -> bytes:
        """The event of an error."""
        body = {"type": "error", "sequence_number": self._number, "code": str(problem.status)}
        body |= {"message": problem.message, "param": problem.param}
        return event_frame(_encode(body), "error")


def response_routes(responses: Responses, compactions: Compactions, answers: HttpAnswers) -> list[Any]:
    """Handlers below /v1."""

    @post("/responses", status_code=200, responses=documented(Response), summary="Respond")
    async def create_response(request: JsonRequest, data: ResponsesRequest) -> ASGIApp:
        """Continues a conversation that the server may keep; a stream of events with `stream`."""
        answers.check_ready()
        headers = ClientHeaders.read(request.headers)
        if data.stream:
            numbered = _Numbered(responses.stream(data, headers))
            return answers.stream(numbered.frames(), numbered.error_frame)
        return await answers.whole(responses.create(data, headers), request)

    @post("/responses/render", status_code=200, responses=documented(RenderedRequest), summary="Render a response")
    async def render_response(request: JsonRequest, data: ResponsesRequest) -> ASGIApp:
        """Token ids and sampling parameters of a response; nothing is generated."""
        answers.check_ready()
        return await answers.whole(responses.render(data), request)

    @get("/responses/{response_id:str}", responses=documented(Response), summary="Response")
    async def retrieve_response(
        response_id: str,
        stream: Annotated[bool, Parameter(description="Its events instead, those that are past included.")] = False,
        starting_after: Annotated[
            int | None, Parameter(description="Leave out events up to this sequence number.")
        ] = None,
    ) -> ASGIApp:
        """A stored response as it is now."""
        answers.check_ready()
        if stream:
            start = 0 if starting_after is None else max(starting_after + 1, 0)
            numbered = _Numbered(responses.follow(response_id, start), start)
            return answers.stream(numbered.frames(), numbered.error_frame)
        return json_answer(await responses.retrieve(response_id))

    @post("/responses/input_tokens", status_code=200, responses=documented(InputTokenCount), summary="Count tokens")
    async def count_input_tokens(request: JsonRequest, data: InputTokensRequest) -> ASGIApp:
        """Counts the tokens of a request's prompt."""
        answers.check_ready()
        return await answers.whole(responses.count_input(data), request)

    @post("/responses/compact", status_code=200, responses=documented(Compaction), summary="Compact")
    async def compact_conversation(request: JsonRequest, data: CompactRequest) -> ASGIApp:
        """A shorter conversation: the model's summary replaces its own messages and its tools' results."""
        answers.check_ready()
        return await answers.whole(compactions.compact(data, ClientHeaders.read(request.headers)), request)

    @get("/responses/{response_id:str}/input_items", responses=documented(ItemPage), summary="Input")
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Parameter(description="Most items of the page.")] = 20,
        order: Annotated[Literal["asc", "desc"], Parameter(description="Oldest or newest first.")] = "desc",
        after: Annotated[str | None, Parameter(description="Id of the item that the page follows.")] = None,
    ) -> ASGIApp:
        """The items that a stored response answered."""
        answers.check_ready()
        return json_answer(
            await responses.input_items(response_id, limit=limit, after=after, newest_first=order == "desc")
        )

    @post("/responses/{response_id:str}/cancel", status_code=200, responses=documented(Response), summary="Cancel")
    async def cancel_response(response_id: str) -> ASGIApp:
        """Ends a response that is made in the background."""
        answers.check_ready()
        return json_answer(await responses.cancel(response_id))

    @delete("/responses/{response_id:str}", status_code=200, responses=documented(DeletedResponse), summary="Forget")
    async def delete_response(response_id: str) -> ASGIApp:
        """Forgets a stored response."""
        answers.check_ready()
        return json_answer(await responses.delete(response_id))

    return [
        create_response,
        render_response,
        count_input_tokens,
        compact_conversation,
        retrieve_response,
        list_input_items,
        cancel_response,
        delete_response,
    ]
