"""/v1/realtime, by a server of a tiny Whisper and a real client: the text is that of the whole file."""

import base64
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.servers import ServerProcess
from tests.tiny_whisper import RATE, sound, wav, write_whisper

websockets = pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import ClientConnection, connect  # noqa: E402

LONG = sound(5, 2.6)
KEY = {"Authorization": "Bearer secret"}
FIELDS: dict[str, Any] = {"language": "en", "temperature": 0, "max_completion_tokens": 12}


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, audit: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("realtime")
    write_whisper(folder)
    arguments = (
        str(folder), "--served-model-name", "ears", "--num-gpu-blocks-override", "200", "--dtype", "float32",
        "--max-num-seqs", "8", "--audit-log-path", str(audit), "--api-key", "secret",
        "--shutdown-timeout", "30", "--allowed-origins", '["https://ours.example"]',
    )  # fmt: skip
    process = ServerProcess(folder, *arguments, env={"QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB": "0.25"})
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


def opened(server: ServerProcess, path: str = "/v1/realtime", headers: dict[str, str] = KEY) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}", additional_headers=headers, proxy=None)


def tell(client: ClientConnection, kind: str, **fields: Any) -> None:
    client.send(json.dumps({"type": kind, **fields}))


def append(client: ClientConnection, samples: np.ndarray, num_samples: int = 1234) -> None:
    data = (samples * 32767).astype("<i2").tobytes()
    for start in range(0, len(data), 2 * num_samples):
        piece = base64.b64encode(data[start : start + 2 * num_samples]).decode()
        tell(client, "input_audio_buffer.append", audio=piece)


def hear(client: ClientConnection) -> dict[str, Any]:
    return dict(json.loads(client.recv(timeout=60)))


def utterance(client: ClientConnection) -> tuple[list[str], dict[str, Any]]:
    """(deltas, the last event) of an utterance."""
    deltas = []
    while (event := hear(client))["type"] == "transcription.delta":
        deltas.append(event["delta"])
    assert event["type"] == "transcription.done", event
    return deltas, event


def of_file(server: ServerProcess, samples: np.ndarray, **fields: Any) -> str:
    answer = httpx.post(
        f"{server.base_url}/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(samples))},
        data={**FIELDS, **fields, "stream": "true"},
        headers=KEY,
        timeout=60,
    )
    done = [line for line in answer.text.split("\n\n") if "transcript.text.done" in line]
    return str(json.loads(done[0].removeprefix("data: "))["text"])


def test_the_text_is_that_of_the_whole_file(server: ServerProcess) -> None:
    """In the order of vLLM's client, and then utterance by utterance; clips of a long one come before its end."""
    with opened(server) as client:
        assert hear(client)["type"] == "session.created"
        tell(client, "session.update", model="ears", **FIELDS)
        tell(client, "input_audio_buffer.commit")
        append(client, LONG)
        early = hear(client)
        assert early["type"] == "transcription.delta", "a clip is heard before the sound ends"
        tell(client, "input_audio_buffer.commit", final=True)
        deltas, done = utterance(client)
        assert done["text"] == early["delta"] + "".join(deltas) == of_file(server, LONG)
        assert done["usage"]["prompt_tokens"] == 4 * 3
        for number in range(2):
            append(client, sound(number))
            tell(client, "input_audio_buffer.commit")
        for number in range(2):
            assert utterance(client)[1]["text"] == of_file(server, sound(number))
        append(client, LONG[: RATE // 2])
        tell(client, "input_audio_buffer.clear")
        tell(client, "input_audio_buffer.commit", final=True)
        assert utterance(client) == (
            [],
            {
                "type": "transcription.done",
                "text": "",
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            },
        )


def test_the_language_is_heard_once(server: ServerProcess) -> None:
    with opened(server) as client:
        hear(client)
        tell(client, "session.update", session={"model": "ears", "temperature": 0, "max_completion_tokens": 12})
        append(client, LONG)
        tell(client, "input_audio_buffer.commit")
        text = utterance(client)[1]["text"]
    fields = {name: FIELDS[name] for name in ("temperature", "max_completion_tokens")}
    answer = httpx.post(
        f"{server.base_url}/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(LONG))},
        data=fields,
        headers=KEY,
        timeout=60,
    )
    assert text == answer.json()["text"]


def test_wrong_events_are_told_and_the_session_goes_on(server: ServerProcess) -> None:
    samples = base64.b64encode(b"abc").decode()
    wrong: list[tuple[str, str, str]] = [
        ("{", "invalid_json", "no JSON"),
        ('{"type": "response.create"}', "unknown_event", "session.update"),
        ('{"type": "input_audio_buffer.append"}', "invalid_event", "audio"),
        ('{"type": "input_audio_buffer.commit"}', "model_not_validated", "session.update"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "?"}), "invalid_audio", "base64"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": samples}), "invalid_audio", "16 bits"),
        ('{"type": "session.update", "model": "other"}', "processing_error", "other"),
        ('{"type": "session.update", "language": "xx"}', "processing_error", "language"),
        ('{"type": "session.update", "temperature": -1}', "processing_error", "temperature"),
    ]
    with opened(server) as client:
        hear(client)
        for message, code, words in wrong:
            client.send(message)
            event = hear(client)
            assert (event["type"], event["code"]) == ("error", code), event
            assert words in event["error"]
        tell(client, "session.update", model="ears", **FIELDS)
        append(client, sound())
        tell(client, "input_audio_buffer.commit")
        assert utterance(client)[1]["text"] == of_file(server, sound())


def test_too_many_samples_end_the_session(server: ServerProcess) -> None:
    with opened(server) as client:
        hear(client)
        append(client, np.zeros(140_000, np.float32), 140_000)
        event = hear(client)
        assert event["code"] == "too_much_audio"
        assert "MAX_AUDIO_CLIP_FILESIZE_MB" in event["error"]
        with pytest.raises(ConnectionClosed) as closed:
            hear(client)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize(
    ("path", "headers", "status", "words"),
    [
        ("/v1/realtime", {}, 401, "API key"),
        ("/v1/realtime", {"Authorization": "Bearer wrong"}, 401, "wrong"),
        ("/v1/realtime", {**KEY, "Origin": "https://theirs.example"}, 403, "--allowed-origins"),
        ("/v1/other", KEY, 404, "no such route"),
    ],
)
def test_connections_that_are_refused(
    server: ServerProcess, path: str, headers: dict[str, str], status: int, words: str
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(server, path, headers)
    assert refused.value.response.status_code == status
    body = refused.value.response.body
    assert body is not None
    assert words in json.loads(body)["error"]["message"]


def test_connections_of_our_pages_and_plain_requests(server: ServerProcess) -> None:
    for origin in ("https://ours.example", server.base_url):
        with opened(server, headers={**KEY, "Origin": origin}) as client:
            assert hear(client)["type"] == "session.created"
    plain = httpx.get(f"{server.base_url}/v1/realtime", headers=KEY)
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
    assert "ws://" in plain.json()["error"]["message"]


def test_a_client_that_hangs_up_frees_all(server: ServerProcess) -> None:
    with opened(server) as client:
        hear(client)
        tell(client, "session.update", model="ears", language="en", temperature=1, max_completion_tokens=50)
        append(client, sound(1, 7.0), 30_000)
        assert hear(client)["type"] == "transcription.delta"
        client.socket.close()  # without a word
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        text = httpx.get(f"{server.base_url}/metrics").text
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        running = [float(rows[name]) for name in rows if name.startswith("vllm:num_requests_")]
        if running and not any(running):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("requests of a client that is gone still run")
    with opened(server) as client:
        assert hear(client)["type"] == "session.created"


def test_sounds_without_a_session_are_bounded(server: ServerProcess) -> None:
    with opened(server) as client:
        assert hear(client)["type"] == "session.created"
        for _ in range(2):
            append(client, sound(5, 3.0), num_samples=100_000)
        assert hear(client)["code"] == "model_not_validated"


def test_commits_that_wait_are_bounded(server: ServerProcess) -> None:
    with opened(server) as client:
        tell(client, "session.update", model="ears", **FIELDS)
        for _ in range(100):
            append(client, sound(5, 0.01))
            tell(client, "input_audio_buffer.commit", final=True)
        with contextlib.suppress(ConnectionClosed):
            while True:
                hear(client)
    assert client.close_code == 1009


def test_a_client_that_pings_and_reads_nothing_fills_no_memory(server: ServerProcess) -> None:
    """Its pings are read, and answered as long as it takes the answers."""
    num_pings = 200_000
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(
            b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            b"Authorization: Bearer secret\r\n\r\n"
        )
        assert raw.recv(12) == b"HTTP/1.1 101"
        ping = b"\x89\xfd" + bytes(4) + b"x" * 125
        raw.sendall(ping * num_pings)
        raw.settimeout(2)
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            while data := raw.recv(1 << 20):
                num_bytes += len(data)
    assert 0 < num_bytes < 127 * num_pings / 2


def test_the_audit_has_a_line_for_each_connection(server: ServerProcess, audit: Path) -> None:
    with pytest.raises(InvalidStatus):
        opened(server, headers={})
    with opened(server) as client:
        hear(client)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        if {401, 101} <= {line["status"] for line in lines if line["path"] == "/v1/realtime"}:
            return
        time.sleep(0.05)
    raise AssertionError(lines)


def test_what_was_committed_is_finished_when_the_server_stops(server: ServerProcess) -> None:
    """The last test of this server."""
    wanted = of_file(server, LONG)
    with opened(server) as idle, opened(server) as client:
        hear(idle)
        hear(client)
        tell(client, "session.update", model="ears", **FIELDS)
        append(client, LONG)
        tell(client, "input_audio_buffer.commit")
        first = hear(client)
        server.process.send_signal(signal.SIGTERM)
        deltas, done = utterance(client)
        assert done["text"] == first["delta"] + "".join(deltas) == wanted
        for each in (client, idle):
            with pytest.raises(ConnectionClosed) as closed:
                hear(each)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
    assert server.process.wait(timeout=60) == 0
