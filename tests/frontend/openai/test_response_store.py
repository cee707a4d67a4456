"""The responses that a server stores and makes, alone and with another server of its command."""

import asyncio
from typing import Any

import pytest

from quire.core.errors import EngineError, NotFoundError, OverloadedError, ParameterError
from quire.frontend.entry_store.access import Answerer, Events, LocalEntries, MakerQuestion
from quire.frontend.entry_store.store import EntryStore
from quire.frontend.openai.responses.answers import Response
from quire.frontend.openai.responses.background_responses import Making, Makings
from quire.frontend.openai.responses.bodies import ConversationRequest, ItemsRequest
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.items import encrypt, to_messages
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.responses.stored import LOST, StoredConversation, StoredResponse, conversation_of
from quire.frontend.openai.responses.unread_events import StreamHistory


def test_a_history_is_read_from_anywhere() -> None:
    async def read(history: StreamHistory, start: int) -> bytes:
        read = b""
        while True:
            events = await history.read(start)
            read += b"".join(events.frames)
            start += len(events.frames)
            if events.ended:
                return read

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


class Servers:
    """Two servers of one command: what they keep is one store, and each asks the other about what that makes."""

    def __init__(self, **bounds: Any) -> None:
        self.entries = EntryStore(**({"max_entries": 10, "max_bytes": 100_000, "max_age_seconds": 100.0} | bounds))
        self.answerers: list[Answerer] = []
        self.makings = [Makings(), Makings()]
        limits = {"max_entries": 10, "max_bytes": bounds.get("max_bytes", 100_000)}
        self.stores = [ResponseStore(OneOfTwo(self, number), self.makings[number], **limits) for number in (0, 1)]

    async def begin(
        self, server: int, name: str, history: StreamHistory | None = None, *, version: int = 1, work: Any = None
    ) -> Making:
        """Server `server` makes a response by `work`, which by default never ends by itself."""
        stored = a_response(name)
        events = None if history is None else ()
        assert await self.stores[server].put_new(stored.entry(version, events=events, maker=server))
        making = Making(stored.response, history, asyncio.create_task(work or asyncio.sleep(600)))
        self.makings[server].add(version, making)
        await asyncio.sleep(0)  # the task begins
        return making


class OneOfTwo(LocalEntries):
    def __init__(self, servers: Servers, server: int) -> None:
        super().__init__(servers.entries)
        self.server = server
        self._servers = servers

    async def ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        return await self._servers.answerers[maker](question)

    def answer_with(self, answer: Answerer) -> None:
        self._servers.answerers.append(answer)


def a_response(name: str) -> StoredResponse:
    response = Response(id=name, created_at=0, model="m", status="in_progress", background=True)
    return StoredResponse(response=response, items=[{"role": "user", "content": "Hi"}], num_input_items=1)


def test_what_one_server_makes_is_told_and_ended_at_the_other() -> None:
    async def main() -> None:
        servers = Servers()
        other = servers.stores[1]
        history = StreamHistory()
        making = await servers.begin(0, "resp_a", history)
        making.response.model = "changed"
        assert (await other.response("resp_a")).response.model == "changed"
        reading = asyncio.create_task(other.events("resp_a", 1))
        history.add([b"0"])
        await asyncio.sleep(0)
        history.add([b"1"])
        assert await reading == Events([b"1"], ended=False)
        assert (await other.cancel("resp_a")).status == "cancelled"
        assert making.task.cancelled()
        abandoned = await servers.begin(0, "resp_b", version=2)
        with pytest.raises(ParameterError, match="background=true and stream=true"):
            await other.events("resp_b", 0)
        await other.delete("resp_b")
        await asyncio.wait([abandoned.task])
        assert abandoned.task.cancelled()
        with pytest.raises(NotFoundError):
            await servers.stores[0].response("resp_b")

    asyncio.run(main())


def test_an_id_that_is_taken_again_means_the_new_response_while_the_old_one_still_ends() -> None:
    async def main() -> None:
        servers = Servers()
        may_end = asyncio.Event()

        async def ends_slowly() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                await may_end.wait()  # as where its last state is put

        old = await servers.begin(0, "resp_a", work=ends_slowly())
        await servers.stores[1].delete("resp_a")
        new = await servers.begin(0, "resp_a", version=2)
        new.response.model = "new"
        may_end.set()
        await asyncio.wait([old.task])
        await asyncio.sleep(0)  # what is done once it has ended
        assert (await servers.stores[1].response("resp_a")).response.model == "new"
        assert (await servers.stores[1].cancel("resp_a")).status == "cancelled"
        assert new.task.cancelled()

    asyncio.run(main())


def test_an_old_response_is_abandoned_and_not_the_new_one_with_its_id() -> None:
    """The id is taken again while a server asks another one to abandon what it makes."""

    async def main() -> None:
        servers = Servers()
        old = await servers.begin(0, "resp_a")
        new: list[Making] = []
        answer = servers.answerers[0]

        async def answer_late(question: MakerQuestion) -> bytes | None:
            new.append(await servers.begin(0, "resp_a", version=2))
            return await answer(question)

        servers.answerers[0] = answer_late
        await servers.stores[1].delete("resp_a")
        await asyncio.wait([old.task])
        assert not new[0].task.done()
        new[0].task.cancel()

    asyncio.run(main())


def test_what_is_finished_is_found_once_its_maker_does_not_know_it() -> None:
    async def main() -> None:
        servers = Servers()
        making = await servers.begin(0, "resp_a", StreamHistory())
        making.task.cancel()
        await asyncio.wait([making.task])
        finished = a_response("resp_a")
        finished.response.status = "completed"
        find = servers.entries.find
        entries = [finished.entry(1, events=[b"0", b"1"]), find("resp_a")]
        servers.entries.find = lambda *_: entries.pop()  # type: ignore[method-assign]
        assert (await servers.stores[1].response("resp_a")).response.status == "completed"
        servers.entries.find = find  # type: ignore[method-assign]
        await servers.stores[0].put(finished.entry(1, events=[b"0", b"1"]), replaces=1)
        assert await servers.stores[1].events("resp_a", 1) == Events([b"1"], ended=True)

    asyncio.run(main())


def test_a_response_whose_maker_has_ended_has_failed() -> None:
    async def main() -> None:
        servers = Servers()
        making = await servers.begin(0, "resp_a", StreamHistory())
        servers.entries.on_maker_ended(0)
        lost = (await servers.stores[1].response("resp_a")).response
        assert (lost.status, lost.error) == ("failed", LOST)
        with pytest.raises(EngineError, match="its events are lost"):
            await servers.stores[1].events("resp_a", 0)
        making.task.cancel()

    asyncio.run(main())


def test_no_change_of_a_conversation_is_lost() -> None:
    """Two servers add items at the same time: the second one begins again."""

    async def main() -> None:
        servers = Servers()
        conversation = await KeptConversations(servers.stores[0]).create(ConversationRequest())
        name = conversation.id

        def add(stored: StoredConversation) -> StoredConversation:
            if not stored.items:
                other = conversation_of(servers.entries.find(name))  # type: ignore[arg-type]
                other.items.append({"id": "first"})
                assert servers.entries.put(other.entry()) == "kept"
            stored.items.append({"id": "second"})
            return stored

        await servers.stores[1].change(name, add)
        items = (await servers.stores[0].conversation(name)).items
        assert [item["id"] for item in items] == ["first", "second"]
        with pytest.raises(NotFoundError, match="There is no response"):
            await servers.stores[0].response(name)

    asyncio.run(main())


def test_a_conversation_that_grows_too_large_is_refused_or_dropped() -> None:
    async def main() -> None:
        servers = Servers(max_bytes=1000)
        kept = KeptConversations(servers.stores[0])
        conversation = await kept.create(ConversationRequest())
        large = [{"role": "user", "content": "x" * 1000}]
        with pytest.raises(ParameterError, match="items would make this take"):
            await kept.add(conversation.id, ItemsRequest(items=large))
        assert (await kept.retrieve(conversation.id)).id == conversation.id
        await kept.extend(conversation.id, large)
        with pytest.raises(NotFoundError):
            await kept.retrieve(conversation.id)

    asyncio.run(main())


def test_a_conversation_for_which_responses_in_the_making_leave_no_room_is_refused() -> None:
    async def main() -> None:
        servers = Servers(max_bytes=1200)
        kept = KeptConversations(servers.stores[0])
        conversation = await kept.create(ConversationRequest())
        await servers.begin(0, "resp_a")
        items = [{"role": "user", "content": "x" * 600}]
        with pytest.raises(OverloadedError, match="no room, and the conversation is gone"):
            await kept.add(conversation.id, ItemsRequest(items=items))
        with pytest.raises(OverloadedError, match="no room, and no conversation is created"):
            await kept.create(ConversationRequest(items=items))

    asyncio.run(main())


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
        ({"role": "assistant", "content": [{"type": "input_file"}]}, "reads text only"),
        ({"role": "user"}, "a string or a list of parts"),
    ],
)
def test_bad_items_are_named(item: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=rf"input\[0\] .*{said}"):
        to_messages([item])
