"""The outputs of several prompts, merged in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.core.errors import EngineError
from quire.frontend.requests.merging import merge


class Stream:
    """Stands in for one prompt's outputs."""

    def __init__(self, *items: Any) -> None:
        self._items = items

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self._items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item


def collect(*streams: Stream) -> list[tuple[int, Any]]:
    async def main() -> list[tuple[int, Any]]:
        return [item async for item in merge(streams)]  # type: ignore[arg-type]

    return asyncio.run(main())


def test_merge_keeps_each_prompts_order() -> None:
    merged = collect(Stream(1, 2, 3), Stream(), Stream(4, 5))
    assert [item for index, item in merged if index == 0] == [1, 2, 3]
    assert [item for index, item in merged if index == 2] == [4, 5]
    assert len(merged) == 5
    assert collect(Stream(1, 2)) == [(0, 1), (0, 2)]


def test_merge_raises_what_a_stream_raises() -> None:
    with pytest.raises(EngineError, match="down"):
        collect(Stream(1, 2, 3), Stream(EngineError("down")))
    with pytest.raises(EngineError, match="down"):
        collect(Stream(EngineError("down")))
