"""Many large bodies at once: each is decoded in its turn, and other work of the loop has its own between."""

import asyncio
import json

from msgspec import Struct

from quire.frontend.http.json_request import LARGE_BODY, BodyReader


class Body(Struct):
    text: str


def test_other_work_has_its_turn_between_large_bodies() -> None:
    reader, body = BodyReader(strict=False), json.dumps({"text": "x" * LARGE_BODY}).encode()

    async def main() -> list[int]:
        done: list[int] = []
        turns = 0

        async def read() -> None:
            value, _ = await reader.read_in_turn(body, Body)
            assert len(value.text) == LARGE_BODY
            done.append(turns)

        async def work() -> None:
            nonlocal turns
            while len(done) < 5:
                turns += 1
                await asyncio.sleep(0)

        await asyncio.gather(work(), *(read() for _ in range(5)))
        return done

    done = asyncio.run(main())
    assert done == sorted(set(done))


def test_a_small_body_waits_for_no_large_one() -> None:
    reader, large = BodyReader(strict=False), json.dumps({"text": "x" * LARGE_BODY}).encode()
    done: list[str] = []

    async def read(name: str, body: bytes) -> None:
        await reader.read_in_turn(body, Body)
        done.append(name)

    async def main() -> None:
        await asyncio.gather(*(read("large", large) for _ in range(3)), read("small", b'{"text": ""}'))

    asyncio.run(main())
    assert done == ["small", "large", "large", "large"]
