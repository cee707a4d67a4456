"""Messages over a real socket."""

import asyncio
from pathlib import Path

from quire.core.wire.channel import bind_router, connect_dealer


def test_a_message_that_cannot_be_handled_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        unhandled: list[BaseException | None] = []
        loop.set_exception_handler(lambda _, context: unhandled.append(context.get("exception")))
        seen: list[bytes] = []
        done = asyncio.Event()

        def on_message(frames: list[bytes]) -> None:
            seen.append(frames[-1])
            if len(seen) == 1:
                raise ValueError("not this one")
            if len(seen) == 3:
                done.set()

        address = f"ipc://{tmp_path}/socket"
        router = bind_router(address, None, on_message)
        dealer = connect_dealer(address, None, lambda frames: None)
        for payload in (b"1", b"2", b"3"):
            dealer.send([payload])
        async with asyncio.timeout(60):
            await done.wait()
        assert seen == [b"1", b"2", b"3"]
        assert [str(error) for error in unhandled] == ["not this one"]
        dealer.close()
        router.close()

    asyncio.run(scenario())
