"""Several API servers process an image once for all."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx

from tests.image_checkpoints import make_image, write_checkpoint
from tests.servers import ServerProcess


def test_an_image_is_processed_once_for_all_servers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llava", "llava")
    buffer = io.BytesIO()
    make_image(70, 45).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    server = ServerProcess(
        tmp_path, str(folder), "--dtype", "float32", "--max-model-len", "200", "--num-gpu-blocks-override", "60",
        "--api-server-count", "2", "--mm-processor-cache-type", "shm", "--served-model-name", "tiny",
    )  # fmt: skip

    def ask(**image: Any) -> httpx.Response:
        """The answer to a request on a connection of its own, which either server may accept."""
        content = [{"type": "image_url", **image}, {"type": "text", "text": "What?"}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)

    try:
        server.wait_until_ready()
        assert ask(image_url={"url": url}, uuid="cat").status_code == 200
        replies = [ask(image_url=None, uuid="cat") for _ in range(12)]
        assert {each.status_code for each in replies} == {200}, "either server finds it by its name alone"
        for _ in range(8):
            assert ask(image_url={"url": url}).status_code == 200
        assert counted(server) == (21, 19)
    finally:
        server.stop()


def counted(server: ServerProcess) -> tuple[float, float]:
    lines = httpx.get(f"{server.base_url}/metrics").text.splitlines()
    names = ("vllm:mm_cache_queries_total{", "vllm:mm_cache_hits_total{")
    queries, hits = (float(next(x for x in lines if x.startswith(name)).rpartition(" ")[2]) for name in names)
    return queries, hits
