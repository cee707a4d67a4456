"""What a client says of a request in HTTP headers instead of the body, the same in all protocols."""

from collections.abc import Mapping
from typing import Self

from msgspec import Struct

from quire.core.errors import ParameterError

RANK_HEADER = "X-data-parallel-rank"


class ClientHeaders(Struct, frozen=True):
    """The headers of one request that are about its answer; none where the request did not come by HTTP."""

    request_id: str | None = None
    data_parallel_rank: int | None = None  # the engine that shall have the request; None lets the router choose

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> Self:
        """Reads them; `headers` finds names in lower case.

        Raises:
            ParameterError: the rank is not a number.
        """
        rank = headers.get(RANK_HEADER.lower())
        try:
            return cls(headers.get("x-request-id"), None if rank is None else int(rank))
        except ValueError:
            raise ParameterError(
                f"{RANK_HEADER} must be the number of an engine, got {rank!r:.100}.", param=RANK_HEADER
            ) from None
