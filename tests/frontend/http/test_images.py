"""Images over HTTP, in every protocol that takes them: a real server with a tiny model, and real clients."""

import base64
import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch
from PIL import Image

from tests.commands import quire
from tests.image_checkpoints import make_image, write_checkpoint
from tests.servers import ServerProcess

IMAGE = make_image(70, 45)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "cat.png").write_bytes(encoded(IMAGE))
    return folder


@pytest.fixture(scope="module")
def server(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_checkpoint(tmp_path_factory.mktemp("llava") / "llava", "llava")
    arguments = (
        "--dtype", "float32", "--max-model-len", "400", "--num-gpu-blocks-override", "160",
        "--limit-mm-per-prompt", '{"image": 2}', "--allowed-local-media-path", str(media),
        "--allowed-media-domains", "127.0.0.1", "--enable-mm-embeds",
    )  # fmt: skip
    env = {"QUIRE_SERVER_DEV_MODE": "1"}
    process = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), *arguments, env=env)
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture
def site() -> Iterator[str]:
    """A web server of this machine with the image."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cat.png" else 404)
            self.end_headers()
            if self.path == "/cat.png":
                self.wfile.write(encoded(IMAGE))

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()


def chat(client: openai.OpenAI, model: str, *urls: str, **part: Any) -> Any:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}, **part} for url in urls]
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}],
        temperature=0, max_tokens=8, logprobs=True, extra_body={"ignore_eos": True},
    )  # fmt: skip


def text_of(reply: Any) -> str:
    return reply.choices[0].message.content


def test_the_same_image_gives_the_same_answer_however_it_is_written(
    client: openai.OpenAI, model: str, server: ServerProcess, site: str, media: Path
) -> None:
    expected = chat(client, model, data_url(encoded(IMAGE)))
    assert expected.usage.prompt_tokens > 16  # of the image alone
    for url in (f"{site}/cat.png", (media / "cat.png").as_uri(), data_url(encoded(IMAGE, "BMP"))):
        assert text_of(chat(client, model, url)) == text_of(expected)
    response = client.responses.create(
        model=model, temperature=0, max_output_tokens=8, store=False, extra_body={"ignore_eos": True},
        input=[{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(encoded(IMAGE)), "detail": "auto"},
            {"type": "input_text", "text": "What is this?"},
        ]}],
    )  # fmt: skip
    assert response.output_text == text_of(expected)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(IMAGE)).decode()}
    message = anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0).messages.create(
        model=model, max_tokens=8, extra_body={"ignore_eos": True, "temperature": 0},
        messages=[{"role": "user", "content": [
            {"type": "image", "source": source}, {"type": "text", "text": "What is this?"},
        ]}],
    )  # fmt: skip
    assert text_of(expected).startswith(message.content[0].text)  # type: ignore[union-attr]


def test_another_image_gives_other_logprobs(client: openai.OpenAI, model: str) -> None:
    replies = [chat(client, model, data_url(encoded(make_image(70, 45, seed)))) for seed in (0, 5)]
    first, second = (reply.choices[0].logprobs.content[0].logprob for reply in replies)
    assert first != pytest.approx(second, abs=1e-6)


def test_a_uuid_stands_for_what_the_server_has(client: openai.OpenAI, model: str) -> None:
    expected = chat(client, model, data_url(encoded(IMAGE)), uuid="cat")
    assert text_of(chat(client, model, "", uuid="cat")) == text_of(expected)
    with pytest.raises(openai.BadRequestError, match="no item"):
        chat(client, model, "", uuid="dog")


def oriented(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    return encoded(image, "PNG", exif=exif)


def first_frame(data: bytes) -> tuple[bytes, Image.Image]:
    return data, Image.open(io.BytesIO(data)).convert("RGB")


LIKE_OTHERS: dict[str, Callable[[], tuple[bytes, Image.Image]]] = {
    "exif": lambda: (oriented(IMAGE), IMAGE.transpose(Image.Transpose.ROTATE_270)),
    "animated": lambda: first_frame(encoded(IMAGE, "GIF", save_all=True, append_images=[make_image(70, 45, 3)])),
    "cmyk": lambda: (encoded(IMAGE.convert("CMYK"), "TIFF"), IMAGE.convert("CMYK").convert("RGB")),
    "grey": lambda: (encoded(IMAGE.convert("L")), IMAGE.convert("L").convert("RGB")),
    "transparent": lambda: (
        encoded(Image.new("RGBA", (70, 45), (10, 200, 30, 0))), Image.new("RGB", (70, 45), "white")
    ),
}  # fmt: skip
"""Files, and the image in RGB that each is."""


@pytest.mark.parametrize("form", LIKE_OTHERS)
def test_images_of_all_forms_are_read_as_what_they_show(form: str, client: openai.OpenAI, model: str) -> None:
    given, shown = LIKE_OTHERS[form]()
    replies = [chat(client, model, data_url(data)) for data in (given, encoded(shown))]
    first, second = (reply.choices[0].logprobs.content[0].logprob for reply in replies)
    assert first == pytest.approx(second, abs=1e-5)


NAME = r"messages\[0\]\.content\[0\]\.image_url"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (data_url(b"no image"), "no image in a format"),
        (data_url(encoded(IMAGE)[:600]), "cannot be decoded"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:text/plain,cat", "must have the form"),
        ("ftp://example.com/cat.png", "must be an address"),
        ("file:///etc/hostname", "names no file below"),
        ("file://[host/cat.png", "cannot be read"),
        ("http://10.0.0.1/cat.png", "not among those that are allowed"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused_by_its_name(
    url: str, message: str, client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{NAME}.*{message}") as refusal:
        chat(client, model, url)
    assert refusal.value.param == "messages[0].content[0].image_url"


class Harmful:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("harm",)


def saved(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def given(client: openai.OpenAI, model: str, value: Any) -> Any:
    parts: list[Any] = [{"type": "image_embeds", "image_embeds": value}, {"type": "text", "text": "What is this?"}]
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=8, logprobs=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_rows_of_a_tower_are_taken(client: openai.OpenAI, model: str) -> None:
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    reply, other = (given(client, model, saved(each)) for each in (rows, -rows))
    assert reply.usage.prompt_tokens == chat(client, model, data_url(encoded(IMAGE))).usage.prompt_tokens
    first, second = (each.choices[0].logprobs.content[0].logprob for each in (reply, other))
    assert first != pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (saved(Harmful()), "no tensor"),
        (saved([1]), "no plain tensor"),
        (saved(torch.zeros(16, 63)), "the shape"),
        (saved(torch.zeros(4).to_sparse()), "no plain tensor|no tensor"),
        (base64.b64encode(b"none").decode(), "no tensor"),
        ("!!!", "base64"),
        ({"rows": ""}, "image_embeds"),
    ],
)
def test_what_is_no_rows_is_refused(value: Any, message: str, client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        given(client, model, value)
    assert refusal.value.param == "messages[0].content[0].image_embeds"


def test_items_that_are_kept_are_counted(client: openai.OpenAI, model: str, server: ServerProcess) -> None:
    def counted() -> list[float]:
        lines = httpx.get(f"{server.base_url}/metrics").text.splitlines()
        names = ("vllm:mm_cache_queries_total{", "vllm:mm_cache_hits_total{")
        return [float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2]) for name in names]

    queries, hits = counted()
    url = data_url(encoded(make_image(41, 43, 9)))
    for expected in (0, 2):
        chat(client, model, url, url if expected else data_url(encoded(make_image(43, 41, 9))))
        assert counted() == [queries + 2 + expected, hits + expected]
    assert httpx.post(f"{server.base_url}/reset_mm_cache").status_code == 200
    chat(client, model, url)
    assert counted() == [queries + 5, hits + 2]


def test_more_images_than_the_limit_are_refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="limit-mm-per-prompt"):
        chat(client, model, *[data_url(encoded(IMAGE))] * 3)


def test_placeholders_in_texts_are_refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="placeholder"):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": data_url(encoded(IMAGE))}},
                {"type": "text", "text": "<image> and what else?"},
            ]}],
        )  # fmt: skip


def test_a_load_of_random_images_is_measured(server: ServerProcess, tmp_path: Path) -> None:
    load = (
        "bench", "serve", "--base-url", server.base_url, "--dataset-name", "random-mm", "--num-prompts", "3",
        "--input-len", "6", "--output-len", "3", "--ignore-eos", "--random-mm-base-items-per-request", "2",
        "--random-mm-bucket-config", "{(48, 32, 1): 1.0}", "--disable-tqdm", "--output-json", str(tmp_path / "out"),
    )  # fmt: skip
    done = quire(*load, "--backend", "openai-chat")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out").read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (3, 9)
    assert figures["total_input_tokens"] > 3 * 2 * 16, "the server's count, with those of images"
    refused = quire(*load)
    assert refused.returncode != 0
    assert "--backend openai-chat" in refused.stderr
