"""Sounds over HTTP for a model that takes them in prompts: a real server with a tiny model, and a real client."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.audio_checkpoints import RATE, make_sound, write_checkpoint
from tests.commands import quire
from tests.servers import ServerProcess

SOUND = make_sound(1.2)


def encoded(samples: np.ndarray, kind: str = "WAV", rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def input_audio(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.wav").write_bytes(encoded(SOUND))
    return folder


@pytest.fixture(scope="module")
def server(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_checkpoint(tmp_path_factory.mktemp("hears") / "qwen2_audio", "qwen2_audio")
    arguments = (
        "--dtype", "float32", "--max-model-len", "400", "--num-gpu-blocks-override", "160",
        "--served-model-name", "ears", "--limit-mm-per-prompt", '{"audio": 2}',
        "--allowed-local-media-path", str(media),
    )  # fmt: skip
    process = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), *arguments)
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, *parts: Any, text: str = "What is this?") -> Any:
    return client.chat.completions.create(
        model="ears", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        temperature=0, max_tokens=8, extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_the_same_sound_gives_the_same_answer_however_it_is_written(client: openai.OpenAI, media: Path) -> None:
    expected = chat(client, input_audio(encoded(SOUND)))
    assert expected.usage.prompt_tokens > 25  # of the sound alone: one for 40 ms
    text = expected.choices[0].message.content
    flac = encoded(np.round(SOUND * 2**15) / 2**15, "FLAC")
    assert chat(client, input_audio(flac, "flac")).usage.prompt_tokens == expected.usage.prompt_tokens
    file = (media / "a.wav").as_uri()
    for url in (data_url(encoded(SOUND)), file):
        assert chat(client, {"type": "audio_url", "audio_url": {"url": url}}).choices[0].message.content == text
    response = client.responses.create(
        model="ears", temperature=0, max_output_tokens=8, store=False, extra_body={"ignore_eos": True},
        input=[{"role": "user", "content": [  # type: ignore[list-item,misc]
            input_audio(encoded(SOUND)), {"type": "input_text", "text": "What is this?"},
        ]}],
    )  # fmt: skip
    assert response.output_text == text


def test_faults_are_named(client: openai.OpenAI) -> None:
    wrong: dict[str, Any] = {
        r"content\[0\].input_audio": {"type": "input_audio", "input_audio": {"format": "wav"}},
        r"content\[0\].audio_url is no sound": {
            "type": "audio_url", "audio_url": {"url": data_url(b"no sound at all, but words")},
        },
        "3 s at once": {"type": "audio_url", "audio_url": {"url": data_url(encoded(make_sound(3.5)))}},
        "type image, but": {"type": "image_url", "image_url": {"url": data_url(b"x")}},
    }  # fmt: skip
    for message, part in wrong.items():
        with pytest.raises(openai.BadRequestError, match=message):
            chat(client, part)


def test_a_file_is_transcribed_by_instruction(server: ServerProcess, client: openai.OpenAI) -> None:
    """As a conversation in which the sound stands before the words, part by part."""
    written = client.audio.transcriptions.create(
        file=("a.wav", encoded(SOUND)), model="ears", temperature=0, language="en",
        extra_body={"max_completion_tokens": 8},
    )  # fmt: skip
    asked = chat(client, input_audio(encoded(SOUND)), text="Transcribe this audio into English.")
    assert written.text == asked.choices[0].message.content.strip()
    long = httpx.post(
        f"{server.base_url}/v1/audio/translations", files={"file": ("a.wav", encoded(make_sound(7.0)))}, timeout=60,
        data={"temperature": 0, "max_completion_tokens": 4, "to_language": "de"},
    )  # fmt: skip
    assert long.status_code == 200
    for fields, param in (
        ({"response_format": "srt"}, "response_format"), ({"language": "xx"}, "language"),
        ({"to_language": "fr", "language": "en"}, "to_language"),
    ):  # fmt: skip
        answer = httpx.post(
            f"{server.base_url}/v1/audio/transcriptions", files={"file": ("a.wav", encoded(SOUND))}, data=fields,
            timeout=60,
        )  # fmt: skip
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_sounds_are_transcribed_while_they_come(client: openai.OpenAI, server: ServerProcess) -> None:
    """A model that hears 3 s at once: the text is that of the file."""
    pytest.importorskip("websockets")
    from websockets.sync.client import connect

    sound, fields = make_sound(5.0), {"language": "en", "temperature": 0, "max_completion_tokens": 4}
    samples = (sound * 32767).astype("<i2")
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    stream = client.audio.transcriptions.create(
        file=("a.wav", file.getvalue()), model="ears", stream=True, language="en", temperature=0,
        extra_body={"max_completion_tokens": 4},
    )  # fmt: skip
    *_, whole = stream
    assert whole.type == "transcript.text.done"
    with connect(f"ws://127.0.0.1:{server.port}/v1/realtime", proxy=None) as socket:
        for event in (
            {"type": "session.update", "model": "ears", **fields},
            {"type": "input_audio_buffer.append", "audio": base64.b64encode(samples.tobytes()).decode()},
            {"type": "input_audio_buffer.commit", "final": True},
        ):
            socket.send(json.dumps(event))
        while (event := json.loads(socket.recv(timeout=60)))["type"] != "transcription.done":
            assert event["type"] in ("session.created", "transcription.delta"), event
    assert event["text"] == whole.text


def test_a_load_of_sounds_in_messages_is_measured(server: ServerProcess, media: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"audio": str(media / "a.wav"), "text": "one two", "prompt": "What is said?"}))
    done = quire(
        "bench", "serve", "--base-url", server.base_url, "--backend", "openai-chat", "--dataset-name", "custom_audio",
        "--dataset-path", str(lines), "--num-prompts", "2", "--custom-output-len", "4", "--ignore-eos",
        "--disable-tqdm", "--output-json", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out").read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 8)
    assert figures["total_input_tokens"] > 2 * 10, "the server's count, with that of the sound"
    assert figures["rtfx"] > 0
