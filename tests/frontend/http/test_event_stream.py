"""Event streams send frames as they come, report errors in order, fill silence, and stop when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from quire.core.errors import OverloadedError, QuireError, UnavailableError
from quire.frontend.http import event_stream
from quire.frontend.http.errors import ClientGoneError, ErrorReporter
from quire.frontend.http.event_stream import ACCEPTED, DONE, Accepted, EventStream, event_frame
from quire.frontend.http.server_state import ServerState


class Source:
    """Frames that come when the test says so; knows whether it was closed."""

    def __init__(self, *script: bytes | float | Exception | Callable[[], bool]) -> None:
        self._script = script
        self.closed = False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields bytes, sleeps floats, raises exceptions, waits until functions say True."""
        try:
            for step in self._script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                elif callable(step):
                    while not step():
                        await asyncio.sleep(0.001)
                else:
                    await asyncio.sleep(step)
        finally:
            self.closed = True


class Client:
    """The other end: hangs up after `patience` seconds."""

    def __init__(self, patience: float = 60) -> None:
        self._patience = patience
        self.messages: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(self._patience)
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


def play(source: Source, client: Client, *, stop_after: float | None = None, keep_alive_seconds: float = 0) -> None:
    async def main() -> None:
        state = ServerState()
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, state.stop)
        reporter = ErrorReporter(log_stacks=False, max_body_bytes=1)
        stream = EventStream(source.frames(), state, reporter, keep_alive_seconds=keep_alive_seconds)
        try:
            await stream({"method": "POST", "path": "/x"}, client.receive, client.send)  # type: ignore[arg-type]
        finally:
            assert state.num_in_flight == 0

    asyncio.run(main())


def error_in(frame: bytes) -> dict[str, Any]:
    assert frame.endswith(b"\n\n" + DONE)
    return json.loads(frame.removeprefix(b"data: ").removesuffix(DONE))["error"]


def test_frames_go_out_in_order_and_the_body_ends() -> None:
    source, client = Source(b"a", b"b", 0.01, b"c"), Client()
    play(source, client)
    assert client.messages[0]["status"] == 200
    assert client.bodies == [b"a", b"b", b"c", b""]
    assert [message.get("more_body") for message in client.messages[1:]] == [True, True, True, False]
    assert source.closed


def test_error_before_the_first_frame_is_left_to_http() -> None:
    client = Client()
    with pytest.raises(OverloadedError):
        play(Source(0.01, OverloadedError("full", retry_after_seconds=1)), client)
    assert client.messages == []


def test_error_after_the_first_frame_is_an_event() -> None:
    source, client = Source(b"a", QuireError("the engine fell over")), Client()
    play(source, client)
    first, second, end = client.bodies
    assert (first, end) == (b"a", b"")
    assert error_in(second) == {
        "message": "the engine fell over",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


def test_slow_first_frame_starts_the_stream_and_its_error_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "UNDECIDED_SECONDS", 0.01)
    client = Client()
    play(Source(ACCEPTED, 0.05, QuireError("late")), client)
    assert client.messages[0]["status"] == 200
    assert error_in(client.bodies[0])["message"] == "late"


def test_what_opens_a_stream_does_not_wait_for_the_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with the headers, or right before a frame that is there sooner; a refusal gets its own status."""
    client = Client()
    play(Source(Accepted(b"open"), b"a", b"b"), client)
    assert client.bodies == [b"opena", b"b", b""]
    with pytest.raises(OverloadedError):
        play(Source(Accepted(b"open"), OverloadedError("full", retry_after_seconds=1)), Client())
    monkeypatch.setattr(event_stream, "UNDECIDED_SECONDS", 0.01)
    late = Client()
    play(Source(Accepted(b"open"), lambda: late.bodies == [b"open"], b"a"), late)
    assert late.bodies == [b"open", b"a", b""]


@pytest.mark.parametrize(("keep_alive_seconds", "opening"), [(60, [event_stream.KEEP_ALIVE]), (0, [])])
def test_a_stream_with_nothing_to_open_it_begins_with_a_comment(
    monkeypatch: pytest.MonkeyPatch, keep_alive_seconds: float, opening: list[bytes]
) -> None:
    """Unless comments are turned off."""
    monkeypatch.setattr(event_stream, "UNDECIDED_SECONDS", 0.01)
    client = Client()
    script = Source(ACCEPTED, lambda: bool(client.messages) and client.bodies == opening, b"a")
    play(script, client, keep_alive_seconds=keep_alive_seconds)
    assert client.bodies == [*opening, b"a", b""]
    soon = Client()
    play(Source(ACCEPTED, b"a"), soon, keep_alive_seconds=keep_alive_seconds)
    assert soon.bodies == [b"a", b""]


def test_a_frame_that_comes_before_the_early_headers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "UNDECIDED_SECONDS", 0.01)
    early, start_early = asyncio.Event(), EventStream._start_early

    def wakes_the_source_first(self: EventStream, send: Any) -> None:
        early.set()
        start_early(self, send)

    class Late(Source):
        async def frames(self) -> AsyncGenerator[bytes]:
            yield Accepted(b"open")
            await early.wait()
            yield b"a"

    monkeypatch.setattr(EventStream, "_start_early", wakes_the_source_first)
    client = Client()
    play(Late(), client)
    assert [each["type"] for each in client.messages].count("http.response.start") == 1
    assert client.bodies == [b"open", b"a", b""]


def test_headers_wait_until_the_request_is_accepted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "UNDECIDED_SECONDS", 0.01)
    client = Client()
    with pytest.raises(OverloadedError):
        play(Source(0.05, OverloadedError("full", retry_after_seconds=1)), client)
    assert client.messages == []


def test_client_that_goes_closes_the_source() -> None:
    source, client = Source(b"a", 60.0), Client(patience=0.02)
    play(source, client)
    assert source.closed
    assert client.bodies == [b"a"]


def test_client_that_goes_before_the_first_frame_closes_the_source() -> None:
    source, client = Source(60.0), Client(patience=0.02)
    with pytest.raises(ClientGoneError):
        play(source, client)
    assert source.closed


def test_stop_of_the_server_is_told_in_the_stream() -> None:
    source, client = Source(b"a", 60.0), Client()
    play(source, client, stop_after=0.02)
    assert source.closed
    assert error_in(client.bodies[1])["code"] == 503
    assert client.bodies[2] == b""


def test_stop_of_the_server_before_the_first_frame_is_left_to_http() -> None:
    source = Source(60.0)
    with pytest.raises(UnavailableError):
        play(source, Client(), stop_after=0.02)
    assert source.closed


def test_silence_is_filled_with_comments() -> None:
    client = Client()
    play(Source(b"a", lambda: len(client.bodies) == 3, b"b"), client, keep_alive_seconds=0.05)
    assert client.bodies == [b"a", event_stream.KEEP_ALIVE, event_stream.KEEP_ALIVE, b"b", b""]


def test_busy_stream_needs_no_comments() -> None:
    client = Client()
    play(Source(*[b"x", 0.01] * 10), client, keep_alive_seconds=0.08)
    assert client.bodies == [b"x"] * 10 + [b""]


def test_frames_are_the_events_that_a_client_reads() -> None:
    frames = event_frame(b'{"type":"ping"}', "ping"), event_frame(b'{"a":"\\n"}'), DONE
    read = list(SSEDecoder().iter_bytes(iter(frames)))
    assert [(each.event, each.data) for each in read] == [
        ("ping", '{"type":"ping"}'), (None, '{"a":"\\n"}'), (None, "[DONE]"),
    ]  # fmt: skip
