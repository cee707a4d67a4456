"""The real OpenAI client against the demo model: conversations that the server keeps, and their short form."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.servers import ServerProcess
from tests.weather import QUESTION, REPLY, RESULT, WEATHER_FUNCTION

WEATHER: Any = {"type": "function", "strict": False, **WEATHER_FUNCTION}
ANNA: Any = {"type": "message", "role": "user", "content": "My name is Anna."}
HELLO: Any = {"type": "message", "role": "assistant", "content": "Hello, Anna!"}


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.base_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, given: Any, **options: Any) -> Any:
    options = {"model": "quire-demo", "temperature": 0, "max_output_tokens": 64, **options}
    return client.responses.create(input=given, **options)


def roles(client: openai.OpenAI, conversation_id: str) -> list[str]:
    items: Any = client.conversations.items.list(conversation_id, order="asc")
    return [getattr(item, "role", item.type) for item in items]


def test_a_conversation_is_made_told_changed_and_forgotten(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "names"})
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"topic": "names"})
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "weather"})
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"topic": "weather"})
    assert client.conversations.retrieve(made.id) == changed
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "Hello!", conversation=made.id)
    assert caught.value.param == "conversation"


def test_items_are_added_listed_and_removed_one_by_one(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[ANNA])
    added = client.conversations.items.create(made.id, items=[HELLO, {"role": "user", "content": "Bye."}])
    assert [item.role for item in added.data] == ["assistant", "user"]  # type: ignore[union-attr]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
    page = client.conversations.items.list(made.id, limit=2, order="asc")
    assert page.has_more
    items: list[Any] = list(page)
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [part.type for item in items for part in item.content] == ["input_text", "output_text", "input_text"]
    assert [item.id for item in client.conversations.items.list(made.id)] == [item.id for item in reversed(items)]
    assert client.conversations.items.retrieve(items[1].id, conversation_id=made.id) == items[1]
    assert client.conversations.items.delete(items[1].id, conversation_id=made.id) == made
    assert roles(client, made.id) == ["user", "user"]
    with pytest.raises(openai.NotFoundError, match="no item"):
        client.conversations.items.retrieve(items[1].id, conversation_id=made.id)
    same: Any = {**ANNA, "id": items[0].id}
    [other] = client.conversations.items.create(made.id, items=[same]).data
    assert other.id != items[0].id, "an id names one item"


def test_a_response_answers_a_conversation_and_is_added_to_it(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    ask(client, [ANNA], conversation=made.id, instructions="Be brief.")
    asked = ask(client, "What is my name?", conversation=made.id)
    assert asked.output_text == "Your name is Anna."
    assert asked.conversation.id == made.id
    [*_, question, answer] = client.conversations.items.list(made.id, order="asc")
    assert question.content[0].text == "What is my name?"  # type: ignore[union-attr]
    assert answer.id == asked.output[0].id
    counted = client.responses.input_tokens.count(model="quire-demo", input="And?", conversation=made.id)
    *_, last = ask(client, "And?", conversation={"id": made.id}, stream=True)
    assert last.response.usage.input_tokens == counted.input_tokens > asked.usage.input_tokens
    assert roles(client, made.id) == ["user", "assistant"] * 3
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
        ask(client, "And?", conversation=made.id, previous_response_id=asked.id)
    assert caught.value.param == "conversation"
    assert roles(client, made.id) == ["user", "assistant"] * 3


def test_an_agents_loop_in_a_conversation(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    [call] = ask(client, QUESTION, conversation=made.id, tools=[WEATHER], background=False).output
    client.conversations.items.create(
        made.id, items=[{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    )
    assert ask(client, [], conversation=made.id, tools=[WEATHER], store=False).output_text == REPLY
    assert roles(client, made.id) == ["user", "function_call", "function_call_output", "assistant"]


def test_wrong_items_are_named(client: openai.OpenAI) -> None:
    wrong: Any = [ANNA, {"type": "hologram"}]
    made = client.conversations.create()
    calls: list[Callable[[], object]] = [
        lambda: client.conversations.create(items=wrong),
        lambda: client.conversations.items.create(made.id, items=wrong),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError, match=r"items\[1\] is of type 'hologram'") as caught:
            call()
        assert caught.value.param == "items"
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.update(made.id, metadata={str(number): "" for number in range(17)})
    assert caught.value.param == "metadata"
    assert roles(client, made.id) == []


def test_a_call_adds_twenty_items_at_most(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[ANNA] * 20)
    client.conversations.items.create(made.id, items=[HELLO] * 20)
    assert len(roles(client, made.id)) == 40
    for call in (
        lambda: client.conversations.create(items=[ANNA] * 21),
        lambda: client.conversations.items.create(made.id, items=[ANNA] * 21),
    ):
        with pytest.raises(openai.BadRequestError, match="20 entries, got 21") as caught:
            call()
        assert caught.value.param == "items"


def test_a_compacted_conversation_goes_on(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "developer", "content": "Be brief."}, ANNA, HELLO]
    compacted = client.responses.compact(model="quire-demo", input=turns, extra_body={"max_output_tokens": 64})
    assert compacted.object == "response.compaction"
    assert 0 < compacted.usage.output_tokens <= 64
    *kept, short = compacted.output
    assert [item.role for item in kept] == ["developer", "user"]  # type: ignore[union-attr]
    assert short.type == "compaction"
    summary = base64.b64decode(short.encrypted_content).decode()
    told = [item.model_dump(exclude_unset=True, warnings=False) for item in compacted.output]
    after = ask(client, [*told, {"role": "user", "content": "What is my name?"}])
    assert after.status == "completed"
    spelled = f"{ANNA['content']}\n\nSummary of the conversation so far:\n\n{summary}\n\nWhat is my name?"
    same = ask(client, [turns[0], {"role": "user", "content": spelled}])
    assert (after.usage.input_tokens, after.output_text) == (same.usage.input_tokens, same.output_text)
    again = client.responses.compact(
        model="quire-demo", previous_response_id=after.id, extra_body={"max_output_tokens": 64}
    )
    assert [item.type for item in again.output] == ["message"] * 3 + ["compaction"], "one summary stands for all"


def test_a_compaction_needs_a_conversation_and_room(client: openai.OpenAI) -> None:
    for given, param in (({}, "input"), ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/responses/compact", body={"model": "quire-demo", **given}, cast_to=object)
        assert caught.value.param == param
    sealed: Any = [{"type": "compaction", "encrypted_content": "gAAA%"}]
    with pytest.raises(openai.BadRequestError, match="not from this server"):
        ask(client, sealed)


def test_conversations_are_bounded_as_responses_are(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = ServerProcess(
        tmp_path_factory.mktemp("bounded"), str(checkpoint("llama")), "--served-model-name", "tiny",
        "--max-stored-responses", "2", "--max-stored-response-bytes", "4000", "--num-gpu-blocks-override", "64",
    ).wait_until_ready()  # fmt: skip
    try:
        with httpx.Client(base_url=server.base_url + "/v1", timeout=60) as client:
            first, second, third = (client.post("/conversations", json={}).json()["id"] for _ in range(3))
            assert client.get(f"/conversations/{first}").status_code == 404
            large = {"items": [{"role": "user", "content": "a" * 5000}]}
            for path in ("/conversations", f"/conversations/{third}/items"):
                answer = client.post(path, json=large)
                assert answer.status_code == 400
                assert "--max-stored-response-bytes" in answer.json()["error"]["message"]
            assert client.get(f"/conversations/{third}/items").json()["data"] == []
            body = {"model": "tiny", "input": "a", "conversation": third, "max_output_tokens": 1}
            assert client.post("/responses", json=body).status_code == 200
            assert client.get(f"/conversations/{second}").status_code == 404, "the response took its place"
            assert len(client.get(f"/conversations/{third}/items").json()["data"]) == 2
    finally:
        server.stop()
