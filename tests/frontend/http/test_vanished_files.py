"""A checkpoint's files go while a server runs: what needs none of them is answered, and the rest says why it is not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.servers import WITHOUT_MODEL, ServerProcess


def test_requests_go_on_when_the_checkpoint_is_gone(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.copytree(checkpoint("llama"), folder)
    (folder / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    options = ["--served-model-name", "tiny", "--enable-tokenizer-info-endpoint"]
    server = ServerProcess(tmp_path, str(folder), *options, program=WITHOUT_MODEL).wait_until_ready()
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    bodies = {"/v1/chat/completions": chat, "/v1/completions": {"prompt": "a", "max_tokens": 2}, "/tokenize": chat}
    with httpx.Client(base_url=server.base_url, timeout=60) as http:
        before = {path: http.post(path, json=body).raise_for_status().json() for path, body in bodies.items()}
        info = http.get("/tokenizer_info").raise_for_status().json()
        shutil.rmtree(folder)
        for path, body in bodies.items():
            after = http.post(path, json=body).raise_for_status().json()
            assert after.get("choices") == before[path].get("choices"), path
            assert after.get("tokens") == before[path].get("tokens"), path
        assert http.get("/tokenizer_info").raise_for_status().json() == info
        refused = http.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "a+"}})
        assert refused.status_code == 503
        assert "can no longer read the model's tokenizer" in refused.json()["error"]["message"]
        assert str(folder) not in refused.text
        assert http.get("/health").status_code == 200
    assert "cannot read the tokenizer: " in server.logs()
    assert server.stop() == 0
