"""All bodies that a server receives have one budget of bytes, and give it back however they end."""

import os
from typing import Any

import pytest
from litestar import Litestar, post
from litestar.testing import TestClient
from msgspec import Struct

from quire.core.errors import BodyTooLargeError, ConfigError, OverloadedError
from quire.frontend.http.body_budget import FREE_BYTES, BodyBudget, release_charge
from quire.frontend.http.errors import describe
from quire.frontend.http.form_request import read_form
from quire.frontend.http.json_request import BodyReader, JsonRequest
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.tally import Holdings, Tally, memory_of_holdings


def test_bodies_take_and_give_back() -> None:
    budget = BodyBudget(1000, Tally())
    first, second = budget.charge(), budget.charge()
    for _ in range(4):
        first.add(FREE_BYTES // 4)
    assert budget.held.total == 0, "the first bytes of a body are free"
    first.add(600)
    first.add(100)
    assert budget.held.total == 700
    with pytest.raises(OverloadedError, match="--max-inflight-body-bytes, which is 1000") as caught:
        second.add(FREE_BYTES + 301)
    assert caught.value.retry_after_seconds == 1
    assert budget.held.total == 700, "a refused body holds nothing"
    second.add(FREE_BYTES + 300)
    assert budget.held.total == 1000
    for _ in range(2):
        first.release()
    assert budget.held.total == 300
    scope: dict[str, Any] = {}
    release_charge(scope)
    second.attach(scope)
    release_charge(scope)
    assert budget.held.total == 0


class Form(Struct):
    """Fields of a form."""

    model: str


def test_a_form_gives_back_what_it_took_before_it_is_answered() -> None:
    """A transcription takes long; its body is read by then."""
    budget, held = BodyBudget(2**20, Tally()), []

    class FormRequest(JsonRequest):
        reader = BodyReader(strict=False)

    @post("/")
    async def answer(request: FormRequest) -> None:
        held.append(budget.held.total)
        fields, file = await read_form(request, Form, max_file_bytes=2**20, limit="LIMIT")
        assert (fields.model, len(file.data)) == ("m", 300_000)
        held.append(budget.held.total)

    served = Litestar([answer], request_class=FormRequest)

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        charge = budget.charge()

        async def counting() -> Any:
            message = await receive()
            charge.add(len(message.get("body", b"")))
            held.append(budget.held.total)
            return message

        charge.attach(scope)
        await served(scope, receive if scope["type"] == "lifespan" else counting, send)

    files = {"file": ("a.wav", bytes(300_000))}
    assert TestClient(counted).post("/", data={"model": "m"}, files=files).status_code == 201  # type: ignore[arg-type]
    assert max(held) > 200_000
    assert held[-1] == 0


def test_servers_share_a_tally_and_an_ended_one_has_nothing() -> None:
    memory = memory_of_holdings(3)
    servers = [Holdings.shared(memory, 3, number) for number in range(3)]
    for number, server in enumerate(servers):
        server.connections.add(10**number)
        server.body_bytes.add(7 * 10**number)
    assert {each.connections.total for each in servers} == {111}
    assert {each.body_bytes.total for each in servers} == {777}
    for tally in Holdings.shared(memory, 3, 2):
        tally.clear()
    assert (servers[0].connections.total, servers[0].body_bytes.total) == (11, 77)
    os.close(memory)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 256 * 2**20),
        ({"max_request_body_bytes": 2**30}, 2**31),
        ({"max_inflight_body_bytes": 2**23}, 2**23),
    ],
)
def test_the_budget_has_room_for_a_body(options: dict[str, int], budget: int) -> None:
    assert ServerConfig(**options).body_budget_bytes == budget  # type: ignore[arg-type]


def test_a_budget_without_room_for_a_body_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-inflight-body-bytes 1000 has no room for one body"):
        ServerConfig(max_inflight_body_bytes=1000)


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_for_which_the_whole_budget_is_too_small_is_told_so_and_need_not_come_again(has_length: bool) -> None:
    """An audio file may be larger than --max-request-body-bytes, and so than the budget."""
    budget = BodyBudget(1000, Tally())
    num_bytes = FREE_BYTES + 1001
    charge, neighbour = budget.charge(), budget.charge()
    charge.attach({"headers": [(b"content-length", b"%d" % num_bytes)] if has_length else []})
    neighbour.add(FREE_BYTES + 700)
    charge.add(FREE_BYTES)
    with pytest.raises(BodyTooLargeError, match="--max-inflight-body-bytes 1000 has no room for it"):
        charge.add(1 if has_length else 1001)
    assert budget.held.total == 700
    assert describe(BodyTooLargeError("x")).status == 413
