"""Videos over HTTP: a real server with a tiny model, and a real client."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.image_checkpoints import encode_video, make_frames, write_checkpoint
from tests.servers import ServerProcess

FRAMES = make_frames(12, 64, 48)
VIDEO = encode_video(FRAMES)


def data_url(data: bytes, kind: str = "mp4") -> str:
    return f"data:video/{kind};base64," + base64.b64encode(data).decode()


def png(frame: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "cat.mp4").write_bytes(VIDEO)
    return folder


@pytest.fixture(scope="module")
def server(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5_vl", "qwen2_5_vl")
    arguments = (
        "--dtype", "float32", "--max-model-len", "400", "--num-gpu-blocks-override", "160",
        "--limit-mm-per-prompt", '{"video": 2}', "--allowed-local-media-path", str(media),
        "--media-io-kwargs", '{"video": {"num_frames": 4}}',
    )  # fmt: skip
    process = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), *arguments)
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, *urls: str, **part: Any) -> Any:
    parts: list[Any] = [{"type": "video_url", "video_url": {"url": url}, **part} for url in urls]
    return client.chat.completions.create(
        model="", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}],
        temperature=0, max_tokens=4, logprobs=True, extra_body={"ignore_eos": True},
    )  # fmt: skip


def logprob(reply: Any) -> float:
    return reply.choices[0].logprobs.content[0].logprob


def test_a_video_is_read_however_it_is_written(client: openai.OpenAI, media: Path) -> None:
    """Four of its frames make two steps of time; the same frames as a list say nothing of their times."""
    reply = chat(client, data_url(VIDEO))
    assert reply.usage.prompt_tokens > 2 * 4
    for url in ((media / "cat.mp4").as_uri(), data_url(VIDEO, "x-matroska")):
        assert logprob(chat(client, url)) == pytest.approx(logprob(reply), abs=1e-5)
    other = chat(client, data_url(encode_video(make_frames(12, 64, 48, 7))))
    assert other.usage.prompt_tokens == reply.usage.prompt_tokens
    assert logprob(other) != pytest.approx(logprob(reply), abs=1e-6)
    frames = "data:video/jpeg;base64," + ",".join(map(png, FRAMES[[0, 3, 7, 11]]))
    assert chat(client, frames).usage.prompt_tokens == reply.usage.prompt_tokens
    again = chat(client, data_url(VIDEO), uuid="cat")
    assert logprob(chat(client, "", uuid="cat")) == pytest.approx(logprob(again), abs=1e-5)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (data_url(b"no video"), "no video that can be read"),
        (data_url(VIDEO[: len(VIDEO) // 2]), "no video that can be read"),
        (data_url(encode_video(FRAMES, "matroska", "mjpeg")[:-9000]), "without frames"),
        ("data:video/jpeg;base64,AAAA,BBBB", "frame, number 0"),
        ("data:video/mp4;base64,!!!", "base64"),
        ("ftp://example.com/cat.mp4", "must be an address"),
        ("http://10.0.0.1/cat.mp4", "was not fetched"),
    ],
)
def test_a_video_that_cannot_be_read_is_refused_by_its_name(url: str, message: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        chat(client, url)
    assert refusal.value.param == "messages[0].content[0].video_url"


def test_more_videos_than_the_limit_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="limit-mm-per-prompt"):
        chat(client, *[data_url(VIDEO)] * 3)
