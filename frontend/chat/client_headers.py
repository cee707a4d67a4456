"""Reads request options that clients send as HTTP headers, which are the same in all protocols."""

import uuid
from collections.abc import Mapping
from typing import Self

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.requests.ids import MAX_ID_CHARACTERS

RANK_HEADER = "X-data-parallel-rank"
FRESH_ID_HEADER = "X-Quire-Fresh-Request-Id"
"""The server's own, for a request whose client sends no X-Request-Id."""


class ClientHeaders(Struct, frozen=True):
    """The headers of one request that are about its answer; none where the request did not come by HTTP."""

    request_id: str | None = None  # the client's own
    fresh_id: str | None = None  # the server's, which the answer has as X-Request-Id
    data_parallel_rank: int | None = None  # the engine that shall have the request; None lets the router choose

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> Self:
        """Reads them; `headers` finds names in lower case.

        Raises:
            ParameterError: the rank is not a number.
        """
        rank = headers.get(RANK_HEADER.lower())
        try:
            return cls(
                headers.get("x-request-id") or None,
                headers.get(FRESH_ID_HEADER.lower()),
                None if rank is None else int(rank),
            )
        except ValueError:
            raise ParameterError(
                f"{RANK_HEADER} must be the number of an engine, got {rank!r:.100}.", param=RANK_HEADER
            ) from None

    def choose_id(self, asked: str | None) -> str:
        """The id of an answer: the header's, or else the one that the body asks for, or else a fresh one."""
        return (self.request_id or asked or self.fresh_id or uuid.uuid4().hex)[:MAX_ID_CHARACTERS]
