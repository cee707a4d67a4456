"""A body past the limit is answered 413, and clients read the answer: none is cut off while it still sends."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import requests

from tests.servers import WITHOUT_MODEL, ServerProcess

LIMIT_BYTES = 1 << 20
LARGE_BYTES = 20 << 20
Answer = tuple[int, str]


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    limit = ("--max-request-body-bytes", str(LIMIT_BYTES))
    server = ServerProcess(
        tmp_path_factory.mktemp("large"), str(checkpoint("llama")), *limit, program=WITHOUT_MODEL
    ).wait_until_ready()
    yield server
    server.stop()


@pytest.fixture
def url(server: ServerProcess) -> str:
    return f"{server.base_url}/v1/completions"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("body") / "body.json"
    path.write_text(json.dumps({"prompt": "a" * LARGE_BYTES}))
    return path


def with_urllib(url: str, file: Path) -> Answer:
    """It asks for the connection's end after the answer."""
    request = urllib.request.Request(url, file.read_bytes(), {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return refused.value.code, refused.value.read().decode()


def with_requests(url: str, file: Path) -> Answer:
    answer = requests.post(url, data=file.read_bytes(), timeout=60)
    return answer.status_code, answer.text


def with_requests_in_chunks(url: str, file: Path) -> Answer:
    with file.open("rb") as body:
        answer = requests.post(url, data=iter(lambda: body.read(100_000), b""), timeout=60)
    return answer.status_code, answer.text


def with_httpx(url: str, file: Path) -> Answer:
    answer = httpx.post(url, content=file.read_bytes(), timeout=60)
    return answer.status_code, answer.text


def with_httpx_that_closes(url: str, file: Path) -> Answer:
    answer = httpx.post(url, content=file.read_bytes(), headers={"Connection": "close"}, timeout=60)
    return answer.status_code, answer.text


def with_curl(url: str, file: Path, *options: str) -> Answer:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    command = ["curl", "-sS", *options, "-w", "%{stderr}%{http_code}", "--data-binary", f"@{file}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return int(done.stderr), done.stdout


def with_curl_that_does_not_ask_first(url: str, file: Path) -> Answer:
    return with_curl(url, file, "-H", "Expect:")


def with_curl_that_closes(url: str, file: Path) -> Answer:
    return with_curl(url, file, "-H", "Expect:", "-H", "Connection: close")


def with_node(url: str, file: Path) -> Answer:
    if shutil.which("node") is None:
        pytest.skip("there is no node here")
    program = (
        "const [url, file] = process.argv.slice(1);"
        "const answer = await fetch(url, {method: 'POST', body: (await import('fs')).readFileSync(file)});"
        "console.log(JSON.stringify([answer.status, await answer.text()]));"
    )
    command = ["node", "--input-type=module", "-e", program, url, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    status, text = json.loads(done.stdout)
    return status, text


@pytest.mark.parametrize(
    "client",
    [
        with_urllib, with_requests, with_requests_in_chunks, with_httpx, with_httpx_that_closes,
        with_curl, with_curl_that_does_not_ask_first, with_curl_that_closes, with_node,
    ],
)  # fmt: skip
def test_clients_see_the_answer(client: Callable[[str, Path], Answer], url: str, file: Path) -> None:
    for _ in range(3):
        status, text = client(url, file)
        assert status == 413
        assert f"exceeds {LIMIT_BYTES} bytes" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("client", [with_requests, with_requests_in_chunks])
def test_a_refused_body_takes_no_memory(
    client: Callable[[str, Path], Answer], server: ServerProcess, url: str, file: Path
) -> None:
    client(url, file)
    before = most_memory(server)
    assert client(url, file)[0] == 413
    assert most_memory(server) - before < LARGE_BYTES / 4


def most_memory(server: ServerProcess) -> int:
    """Bytes that the server's process has had at most."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
