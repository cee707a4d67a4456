"""Lines of a batch with images, videos and documents."""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.batch.run_batch import run_batch
from quire.frontend.cli import run_batch as cli
from quire.frontend.flags.parser import CommandParser
from tests.image_checkpoints import encode_video, make_frames, make_image, write_checkpoint
from tests.pdf_files import pdf_of

IMAGES = [make_image(70, 45), make_image(37, 91, 1)]


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url and {"url": url}, **fields}


def line(name: str, *parts: Any, url: str = "/v1/chat/completions", **body: Any) -> str:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", **sampling, "messages": [{"role": "user", "content": content}], **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_lines_have_images_videos_and_documents(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "qwen", "qwen2_vl")
    media = tmp_path / "media"
    media.mkdir()
    IMAGES[0].save(media / "cat.png")
    pngs = []
    for each in IMAGES:
        buffer = io.BytesIO()
        each.save(buffer, "PNG")
        pngs.append(data_url(buffer.getvalue(), "image/png"))
    video = {"type": "video_url", "video_url": {"url": data_url(encode_video(make_frames(4, 56, 56)), "video/mp4")}}
    pdf = {"type": "file", "file": {"file_data": data_url(pdf_of(*IMAGES), "application/pdf")}}
    lines = [
        line("data", image(pngs[0])),
        line("file", image((media / "cat.png").as_uri())),
        line("two", image(pngs[0]), image(pngs[1])),
        line("video", video),
        line("pdf", pdf),
        line("smaller", image(pngs[0]), mm_processor_kwargs={"max_pixels": 28 * 28 * 2}),
        line("outside", image("file:///etc/hostname")),
        line("no image", image("data:image/png;base64,AAAA")),
        line("unknown name", image(None, uuid="dog")),
        line("three", *[image(pngs[0])] * 3),
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{each}\n" for each in lines))
    parser = CommandParser("quire run-batch", "")
    cli.add_arguments(parser)
    given = parser.parse_args([
        *("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", str(folder)),
        *("--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32", "--max-model-len", "400"),
        *("--num-gpu-blocks-override", "160", "--allowed-local-media-path", str(media)),
        *("--limit-mm-per-prompt", '{"image": 2}', "--trust-request-mm-kwargs"),
    ])  # fmt: skip
    assert asyncio.run(run_batch(given.engine_args, given.batch_config, given.server_config)) == 0
    answers = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {each["custom_id"]: each["response"] for each in answers}
    usage, text = ({}, {})
    for name, response in found.items():
        if response["status_code"] == 200:
            usage[name] = response["body"]["usage"]["prompt_tokens"]
            text[name] = response["body"]["choices"][0]["message"]["content"]
    assert text["file"] == text["data"]
    assert usage["file"] == usage["data"] > usage["smaller"]
    assert usage["two"] > usage["data"] < usage["video"]
    for name, message in (
        ("outside", "names no file below --allowed-local-media-path"),
        ("no image", "no image in a format"),
        ("unknown name", "under which this server has no item"),
        ("three", "--limit-mm-per-prompt"),
    ):
        assert (found[name]["status_code"], message in json.dumps(found[name]["body"])) == (400, True), found[name]
    pytest.importorskip("pypdfium2", reason="pages of PDFs need pypdfium2, which the extra media has")
    assert usage["pdf"] > usage["data"], "a page for each"
