"""The responses that the server stores, and for how long."""

import asyncio
from typing import Any

import pytest

from quire.core.errors import NotFoundError, OverloadedError, ParameterError
from quire.frontend.openai.responses.answers import Response
from quire.frontend.openai.responses.items import encrypt, to_messages
from quire.frontend.openai.responses.store import ResponseStore, StoredResponse, StreamHistory


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, text: str = "") -> StoredResponse:
    return StoredResponse(Response(id=name, created_at=0, model="m"), [{"content": text}])


def names(store: ResponseStore) -> list[str]:
    return [name for name in "abcdef" if name in store]


def test_the_oldest_make_room_in_number_bytes_and_age() -> None:
    clock = Clock()
    store = ResponseStore(3, 10_000, 100.0, clock)
    for name in "abcd":
        store.put(stored(name))
        clock.now += 30
    assert names(store) == ["b", "c", "d"]
    store.put(stored("e", "x" * 9000))
    assert names(store) == ["e"], "bytes count, too"
    store.put(stored("f", "x" * 20_000))
    assert names(store) == ["e"], "what is too large alone is not kept, and drives nothing out"
    clock.now += 101
    with pytest.raises(NotFoundError):
        store.response("e")
    assert len(store) == 0


def test_what_is_still_made_is_never_driven_out() -> None:
    async def main() -> None:
        store = ResponseStore(2, 10_000, 100.0)
        running = stored("a")
        running.task = asyncio.create_task(asyncio.sleep(60))
        store.put(running)
        store.check_room()
        for name in "bcd":
            store.put(stored(name))
        assert names(store) == ["a", "d"]
        other = stored("e")
        other.task = asyncio.create_task(asyncio.sleep(60))
        store.put(other)
        with pytest.raises(OverloadedError):
            store.check_room()
        store.delete(running)
        await asyncio.wait([running.task])
        assert running.task.cancelled()
        other.task.cancel()

    asyncio.run(main())


def test_a_recording_is_followed_from_anywhere() -> None:
    async def read(history: StreamHistory, start: int) -> bytes:
        return b"".join([frame async for frames in history.follow(start) for frame in frames])

    async def main() -> list[bytes]:
        history = StreamHistory()
        history.add([b"0", b"1"])
        readers = [asyncio.create_task(read(history, start)) for start in (0, 1, 5)]
        await asyncio.sleep(0)
        for frame in (b"2", b"3", b"4", b"5"):
            history.add([frame])
            await asyncio.sleep(0)
        history.end()
        return [*await asyncio.gather(*readers), await read(history, 4)]

    assert asyncio.run(main()) == [b"012345", b"12345", b"5", b"45"]


def test_items_of_one_turn_become_one_message() -> None:
    call: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": encrypt("Hm.")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": "Done."},
    ]
    system, user, turn, one, other, last = to_messages(items, "Be brief.")
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Hi"}
    assert (turn["content"], turn["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [each["id"] for each in turn["tool_calls"]] == ["1", "2"]
    assert [message["content"] for message in (one, other, last)] == ["a", "b", "Done."]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}, "needs a string 'arguments'"),
        ({"role": "robot", "content": "a"}, "must have a role out of user, assistant, system, developer"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "needs a string 'call_id'"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAA%"}, "not from this server"),
        ({"type": "compaction", "encrypted_content": "gAAA%"}, "not from this server"),
        ({"type": "hologram"}, "'hologram', which is not supported"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "reads text only"),
        ({"role": "user"}, "a string or a list of parts"),
    ],
)
def test_bad_items_are_named(item: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=rf"input\[0\] .*{said}"):
        to_messages([item])
