"""Files and documents over HTTP, and requests' own settings of media: a real server with a tiny model."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from tests.image_checkpoints import encode_video, make_frames, make_image, write_checkpoint
from tests.pdf_files import odd_pdf, pdf_of
from tests.servers import ServerProcess

pytest.importorskip("pypdfium2", reason="pages of PDFs need pypdfium2, which the extra media has")

DPI = 36
PAGES = [make_image(70, 45), make_image(64, 80, 1), make_image(90, 60, 2)]
FILLED = {"ignore_eos": True, "temperature": 0}
QUESTION = {"type": "text", "text": "What is this?"}


def png_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def url_of(data: bytes, kind: str = "application/pdf") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PDF = pdf_of(*PAGES[:2])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_checkpoint(tmp_path_factory.mktemp("qwen") / "qwen", "qwen2_vl")
    arguments = (
        "--dtype", "float32", "--max-model-len", "400", "--num-gpu-blocks-override", "160",
        "--limit-mm-per-prompt", '{"image": 4}', "--trust-request-mm-kwargs",
        "--media-io-kwargs.document", f'{{"dpi": {DPI}, "max_pages": 4}}',
        "--media-io-kwargs.video", '{"num_frames": 4, "fps": 1}',
    )  # fmt: skip
    process = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), *arguments)
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


def ask(client: openai.OpenAI, model: str, *parts: Any, **body: Any) -> Any:
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": [*parts, QUESTION]}], max_tokens=4, logprobs=True,
        extra_body={**FILLED, **body},
    )  # fmt: skip


def file_of(data: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, **fields}}


def image_of(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(png_of(image), "image/png")}}


def first_logprob(reply: Any) -> float:
    return reply.choices[0].logprobs.content[0].logprob


def test_pages_are_images_however_they_are_sent(client: openai.OpenAI, model: str, server: ServerProcess) -> None:
    from quire.frontend.media.documents.pages import render_page

    shown = [render_page(PDF, index, DPI, 0) for index in range(2)]
    assert [page.size for page in shown] == [(page.width // 2, -(-page.height // 2)) for page in PAGES[:2]]
    expected = ask(client, model, *map(image_of, shown))
    text = expected.choices[0].message.content
    for data in (url_of(PDF), base64.b64encode(PDF).decode(), url_of(PDF, "application/octet-stream")):
        reply = ask(client, model, file_of(data, filename="a.pdf"))
        assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
        assert first_logprob(reply) == pytest.approx(first_logprob(expected), abs=1e-5)
    file: Any = {"type": "input_file", "file_data": url_of(PDF), "filename": "a.pdf"}
    response = client.responses.create(
        model=model, temperature=0, max_output_tokens=4, store=False, extra_body={"ignore_eos": True},
        input=[{"role": "user", "content": [file, {"type": "input_text", "text": QUESTION["text"]}]}],
    )  # fmt: skip
    assert response.output_text == text
    source: Any = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(PDF).decode()}
    claude = anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0)
    message = claude.messages.create(
        model=model, max_tokens=4, extra_body=FILLED,
        messages=[{"role": "user", "content": [{"type": "document", "source": source}, QUESTION]}],  # type: ignore
    )  # fmt: skip
    assert text.startswith(message.content[0].text)  # type: ignore[union-attr]
    assert ask(client, model, file_of(url_of(png_of(PAGES[0]), "image/png"))).choices[0].message.content == (
        ask(client, model, image_of(PAGES[0])).choices[0].message.content
    )


def test_documents_of_the_messages_api_have_titles_texts_and_images(server: ServerProcess, model: str) -> None:
    claude = anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0)

    def count(*blocks: Any) -> int:
        return claude.messages.count_tokens(
            model=model, messages=[{"role": "user", "content": [*blocks, QUESTION]}]
        ).input_tokens  # fmt: skip

    plain: Any = {"type": "text", "media_type": "text/plain", "data": "Once upon a time"}
    assert count({"type": "document", "source": plain}) == count({"type": "text", "text": "Once upon a time"})
    titled = {"type": "document", "title": "A tale", "context": "for children", "source": plain}
    assert count(titled) == count({"type": "text", "text": "A tale\n\nfor children\n\nOnce upon a time"})
    data = base64.b64encode(png_of(PAGES[0])).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    mixed = {"type": "content", "content": [{"type": "text", "text": "See"}, image]}
    assert count({"type": "document", "source": mixed}) == count({"type": "text", "text": "See"}, image)
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
    results = [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}, QUESTION]}
        for content in ("seen", [{"type": "text", "text": "seen"}, image])
    ]
    begin = {"role": "user", "content": "Look"}
    without, shown = (
        claude.messages.count_tokens(model=model, messages=[begin, call, result]).input_tokens  # type: ignore
        for result in results
    )
    assert shown > without + 4, "an image that a tool shows is in the prompt"


BAD: list[tuple[dict[str, Any], str]] = [
    (file_of(url_of(PDF[: len(PDF) // 2])), "damaged or cut off"),
    (file_of(url_of(b"%PDF-1.7 nothing")), "damaged or cut off"),
    (file_of(url_of(pdf_of(*[PAGES[0]] * 5))), "5 pages, and 4 are read"),
    (file_of(url_of(odd_pdf(num_pages=10_000))), "10000 pages, and 4 are read"),
    (file_of(url_of(odd_pdf(is_encrypted=True))), "is an encrypted PDF"),
    (file_of(url_of(odd_pdf(num_pages=0))), "damaged"),
    (file_of(url_of(odd_pdf("0 0 90000 90000"))), "number 1, that has 45000 x 45000 pixels"),
    (file_of(url_of(odd_pdf("0 0 0.001 14000"))), "not taken by the model's processor"),
    (file_of(url_of(b"hello", "text/plain")), "of type 'text/plain'; images and PDFs"),
    (file_of(url_of(b"hello")), "no image in a format"),
    (file_of("data:application/pdf;base64,!!"), "base64"),
    (file_of("https://example.com/a.pdf"), "base64"),
    (file_of(5), "must be an object such as"),
    (file_of(""), "must be an object such as"),
    (file_of(url_of(PDF), filename=5), "must be an object such as"),
    ({"type": "file"}, "must be an object such as"),
    ({"type": "file", "file": "a.pdf"}, "must be an object such as"),
    ({"type": "file", "file": {"file_id": "file-1"}}, "file_id, and no files are kept here"),
    ({**file_of(url_of(PDF)), "uuid": "a"}, "no uuid"),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("part", "message"), BAD)
def test_a_file_that_cannot_be_read_is_refused_by_its_name(
    part: dict[str, Any], message: str, client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        ask(client, model, part)
    assert refusal.value.param == "messages[0].content[0].file"


def test_pages_count_as_images(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="limit-mm-per-prompt"):
        ask(client, model, file_of(url_of(pdf_of(*PAGES))), file_of(url_of(PDF)))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"source": {"type": "file", "file_id": "f"}}, "names a file"),
        ({"source": {"type": "base64", "media_type": "text/csv", "data": "AAAA"}}, "'text/csv'; images and PDFs"),
        ({"source": {"type": "base64", "media_type": 5, "data": "AAAA"}}, "media_type must be a string"),
        ({"source": {"type": "other"}}, "must have an address or data"),
        ({"source": {"type": "content", "content": 5}}, "a string or a list of blocks"),
        ({"source": {"type": "content", "content": [{"type": "tool_use"}]}}, "must be text or image"),
        ({"title": 5, "source": {"type": "text", "data": "a"}}, "title must be a string"),
        ({"citations": {"enabled": True}, "source": {"type": "text", "data": "a"}}, "citations are not there"),
    ],
)
def test_a_malformed_document_is_refused(block: Any, message: str, server: ServerProcess, model: str) -> None:
    messages = [{"role": "user", "content": [{"type": "document", **block}]}]
    body = {"model": model, "max_tokens": 4, "messages": messages}
    reply = httpx.post(f"{server.base_url}/v1/messages", json=body)
    assert (reply.status_code, message in reply.json()["error"]["message"]) == (400, True), reply.text


def test_a_request_says_how_its_items_are_read(client: openai.OpenAI, model: str) -> None:
    large = make_image(112, 112, 5)
    sizes = [{}, {"max_pixels": 56 * 56}, {"images_kwargs": {"max_pixels": 56 * 56}}, {"do_sample_frames": None}]
    whole, small, also_small = (
        ask(client, model, image_of(large), mm_processor_kwargs=each).usage.prompt_tokens for each in sizes[:3]
    )
    assert (whole - small, also_small) == (12, small), "of 16 tokens 4 are left"
    assert ask(client, model, image_of(large)).usage.prompt_tokens == whole, "what is kept is of one size"
    video = {"type": "video_url", "video_url": {"url": url_of(encode_video(make_frames(16, 56, 56)), "video/mp4")}}

    def frames(**io_kwargs: Any) -> int:
        return ask(client, model, video, media_io_kwargs={"video": io_kwargs}).usage.prompt_tokens

    assert frames() == frames(num_frames=4, fps=1) < frames(num_frames=4) < frames(num_frames=8)
    pages = [
        ask(client, model, file_of(url_of(PDF)), media_io_kwargs={"document": {"dpi": dpi}}).usage.prompt_tokens
        for dpi in (DPI, 144)
    ]
    assert pages[0] < pages[1]
    clear = Image.new("RGBA", (56, 56), (9, 9, 9, 0))
    colored = [
        ask(client, model, part, media_io_kwargs={"image": {"rgba_background_color": [0, 200, 0]}})
        for part in (image_of(clear), image_of(Image.new("RGB", (56, 56), (0, 200, 0))))
    ]
    assert first_logprob(colored[0]) == pytest.approx(first_logprob(colored[1]), abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mm_processor_kwargs", {"size_of": 1}, "'size_of', which this model's processor does not know"),
        ("mm_processor_kwargs", {"return_tensors": "pt"}, "'return_tensors'"),
        ("mm_processor_kwargs", {"images_kwargs": {"device": "cuda"}}, "'images_kwargs.device'"),
        ("mm_processor_kwargs", {"text_kwargs": {"padding": True}}, "'text_kwargs'"),
        ("mm_processor_kwargs", [1], "must be an object"),
        ("media_io_kwargs", {"image": {"dpi": 5}}, "image has no 'dpi'"),
        ("media_io_kwargs", {"document": {"dpi": 10_000}}, "dpi must be a whole number from 18 to 600"),
        ("media_io_kwargs", {"video": {"num_frames": 0}}, "num_frames must be"),
        ("media_io_kwargs", {"smell": {}}, "'smell' has no options"),
        ("media_io_kwargs", "fast", "must be an object"),
    ],
)
def test_settings_that_there_are_not_are_refused_by_name(
    field: str, value: Any, message: str, client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refusal:
        ask(client, model, image_of(PAGES[0]), **{field: value})
    assert refusal.value.param == field
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(
            model=model, extra_body={field: value}, max_output_tokens=4,
            input=[{"role": "user", "content": [{"type": "input_image", "image_url": url_of(png_of(PAGES[0]))}]}],
        )  # fmt: skip


def test_values_that_a_processor_does_not_take_are_refused(client: openai.OpenAI, model: str) -> None:
    for value in ("wide", -1, [3]):
        with pytest.raises(openai.BadRequestError, match="not taken by the model's processor"):
            ask(client, model, image_of(PAGES[0]), mm_processor_kwargs={"max_pixels": value})
    assert ask(client, model, image_of(PAGES[0])).usage.prompt_tokens
