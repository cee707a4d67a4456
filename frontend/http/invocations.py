"""POST /invocations, as SageMaker calls every model: the fields of the body tell which API it is of."""

import functools
import operator
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from litestar import post
from litestar.types import ASGIApp
from msgspec import Raw

from quire.core.errors import ParameterError
from quire.frontend.http.answers import HttpAnswers, documented
from quire.frontend.http.json_request import JsonRequest, decode_body
from quire.frontend.http.pages.openapi_document import BODY

Handle = Callable[[JsonRequest], Awaitable[ASGIApp]]


class _Kind(NamedTuple):
    """A body: the fields by which it is known, its type, that of its answer, and what answers it."""

    fields: tuple[str, ...]
    body: Any
    answer: Any
    handle: Handle


class Invocations:
    """The bodies that the served model takes. The protocols add theirs."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []

    def add(self, fields: tuple[str, ...], body: Any, answer: Any, handle: Handle) -> None:
        """Adds a kind of body.

        Args:
            fields: those by which it is known; of two kinds that fit a body, the one that was added first takes it.
            body, answer: types, for the documentation.
            handle: reads and answers a request.
        """
        self._kinds.append(_Kind(fields, body, answer, handle))

    def route(self, answers: HttpAnswers) -> Any:
        """The handler of the route."""

        @post(
            "/invocations",
            status_code=200,
            responses=documented(self._union("answer")),
            opt={BODY: self._union("body")},
            summary="Invoke",
        )
        async def invoke(request: JsonRequest) -> ASGIApp:
            """As SageMaker calls it: a body of the route whose fields it has."""
            answers.check_ready()
            return await self._handler_of(await request.body())(request)

        return invoke

    def _handler_of(self, body: bytes) -> Handle:
        present = set(decode_body(body, dict[str, Raw]))
        for kind in self._kinds:
            if present.issuperset(kind.fields):
                return kind.handle
        forms = [" with ".join(kind.fields) for kind in self._kinds]
        raise ParameterError(f"The body must have {', or '.join(forms)}.", param=self._kinds[0].fields[0])

    def _union(self, name: str) -> Any:
        return functools.reduce(operator.or_, [getattr(kind, name) for kind in self._kinds])
