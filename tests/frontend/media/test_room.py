"""The room of sounds that are being worked on: its order, and its bounds."""

import asyncio

import pytest

from quire.core.errors import OverloadedError
from quire.frontend.media.room import Room


def test_others_wait_in_order_and_too_many_are_refused() -> None:
    async def run() -> None:
        room = Room(max_bytes=10, max_at_once=2, max_waiting=2)
        entered: list[str] = []
        leave = {name: asyncio.Event() for name in "abcd"}

        async def work(name: str, num_bytes: int) -> None:
            async with room.place() as place:
                place.settle(num_bytes)
                entered.append(name)
                await leave[name].wait()

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        tasks = {
            name: asyncio.create_task(work(name, size)) for name, size in (("a", 3), ("b", 3), ("c", 12), ("d", 1))
        }
        await settle()
        assert entered == ["a", "b"]
        with pytest.raises(OverloadedError, match="sounds wait"):
            await work("e", 0)
        leave["a"].set()
        await settle()
        assert entered == ["a", "b", "c"]
        leave["b"].set()  # there is a place, and no memory
        await settle()
        assert entered == ["a", "b", "c"]
        tasks["c"].cancel()
        await settle()
        assert entered == ["a", "b", "c", "d"]
        leave["d"].set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    asyncio.run(run())


def test_what_a_sound_may_take_counts_until_it_is_known() -> None:
    async def run() -> None:
        room, entered = Room(max_bytes=10), asyncio.Event()

        async def second() -> None:
            async with room.place(12):
                entered.set()

        async with room.place(12) as first:
            task = asyncio.create_task(second())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not entered.is_set()
            first.settle(3)
            await asyncio.wait_for(entered.wait(), 10)
            await task

    asyncio.run(run())
