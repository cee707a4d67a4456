"""Processes are killed, and clients notice as little as possible."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.executor.doubles import POISON
from tests.servers import ServerProcess, program_with

pytestmark = pytest.mark.turns(4, among="whole systems")

STREAM = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "temperature": 0.9, "seed": 4, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def own_server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose engines tests may kill; the last of them kills the server itself."""
    folder = tmp_path_factory.mktemp("own")
    process = ServerProcess(folder, str(checkpoint("llama")), "--served-model-name", "tiny").wait_until_ready()
    yield process
    process.stop()


def engines_of(server: ServerProcess) -> list[psutil.Process]:
    """The server's living engine processes: one, or none while it is being restarted."""
    children = psutil.Process(server.process.pid).children()
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and "quire.frontend.launch.engine_main" in " ".join(child.cmdline())
    ]


def engine_of(server: ServerProcess) -> psutil.Process:
    [engine] = engines_of(server)
    return engine


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


@pytest.mark.turns(1)
def test_stream_survives_kill_9_of_the_engine(own_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=own_server.base_url + "/v1", api_key="none", max_retries=0)
    # So long that a reader who starts late still sees it made.
    stream = STREAM | {"max_tokens": 1500}
    whole = client.completions.create(model="tiny", **stream).choices[0].text
    victim = engine_of(own_server)
    text, killed = "", False
    for chunk in client.completions.create(model="tiny", stream=True, **stream):
        text += chunk.choices[0].text
        if not killed and len(text) > 20:
            victim.send_signal(signal.SIGKILL)
            killed = True
    assert killed
    assert text == whole
    wait_for(lambda: [each.pid for each in engines_of(own_server)] not in ([], [victim.pid]))


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_outlasts_several_kills(own_server: ServerProcess, n: int) -> None:
    client = openai.OpenAI(base_url=own_server.base_url + "/v1", api_key="none", max_retries=0, timeout=60)
    long: dict[str, Any] = STREAM | {"max_tokens": 2000, "n": n}
    whole = [choice.text for choice in client.completions.create(model="tiny", **long).choices]
    before = counters(own_server)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lambda: client.completions.create(model="tiny", **long))
        wait_for(lambda: running_requests(own_server) == n)
        for _ in range(3):
            kill_engine(own_server)
        assert [choice.text for choice in running.result(timeout=60).choices] == whole
    restarts, replays, pauses = (now - then for now, then in zip(counters(own_server), before, strict=True))
    assert restarts == 3
    assert 1 <= replays <= 3
    assert n <= pauses <= 3 * n


def counters(server: ServerProcess) -> list[float]:
    """Restarts, requests that were submitted again, and pauses of sequences."""
    text = httpx.get(server.base_url + "/metrics").text
    names = ("quire:engine_restarts_total", "quire:request_replays_total", "quire:stream_pause_seconds_count")
    return [
        float(line.rsplit(" ", 1)[1]) for name in names for line in text.splitlines() if line.startswith(name + "{")
    ]


LONG = {"max_tokens": 700, "temperature": 0.9, "seed": 4, "ignore_eos": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", LONG | {"prompt": [5, 6], "temperature": 0}),
    "two": ("completions", LONG | {"prompt": [5, 6], "n": 2, "frequency_penalty": 0.3}),
    "logprobs": ("completions", LONG | {"prompt": [7, 8], "logprobs": 3}),
    "long prompt": ("completions", LONG | {"prompt": [9, 10, 11] * 400, "max_tokens": 500, "prompt_logprobs": 1}),
    "stop": ("completions", LONG | {"prompt": [5, 6, 7], "stop": ["no such text", "nor this"]}),
    "grammar": ("completions", LONG | {"prompt": [5], "structured_outputs": {"regex": "[a-z ]{650,660}"}}),
    "beams": ("completions", {"prompt": [5, 6], "use_beam_search": True, "n": 3, "max_tokens": 60}),
    "chat": ("chat/completions", LONG | {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}),
}
"""Requests of all kinds, by route. Each has drawn hundreds of tokens when engines are killed."""


def test_requests_of_all_kinds_outlast_kills_with_the_same_answers(own_server: ServerProcess) -> None:
    def ask(kind: str) -> Any:
        route, body = KINDS[kind]
        answer = httpx.post(f"{own_server.base_url}/v1/{route}", json=body | {"model": "tiny"}, timeout=100)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with ThreadPoolExecutor(len(KINDS)) as pool:
        undisturbed = list(pool.map(ask, KINDS))
        running = [pool.submit(ask, kind) for kind in KINDS]
        for _ in range(2):
            wait_for(lambda: running_requests(own_server) >= 4)
            kill_engine(own_server)
        for kind, answer, expected in zip(KINDS, running, undisturbed, strict=True):
            assert answer.result() == expected, kind


def test_a_request_that_engines_do_not_survive_is_refused_and_others_are_served(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--served-model-name", "tiny",
        program=program_with("tests.executor.doubles:PoisonWorker"),
        env={"POISON": "raise", "PYTHONPATH": str(Path(__file__).parents[1])},
    ).wait_until_ready()  # fmt: skip
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=60)
    try:
        with pytest.raises(openai.InternalServerError, match="crashed 3 times while it had this request"):
            client.completions.create(model="tiny", prompt=[POISON, 5], max_tokens=5)
        assert client.completions.create(model="tiny", prompt=[5], max_tokens=3).choices[0].finish_reason is not None
    finally:
        server.stop()


def _remove(weights: Path) -> None:
    weights.unlink()


def _cut(weights: Path) -> None:
    os.truncate(weights, weights.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "reason"), [(_remove, "holds no weights"), (_cut, "model.safetensors is corrupt or cut short")]
)
def test_a_server_whose_weights_are_damaged_ends_with_the_reason_at_the_next_restart(
    damage: Callable[[Path], None], reason: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    server = ServerProcess(
        tmp_path, str(folder), "--served-model-name", "tiny", env={"QUIRE_LOST_WEIGHTS_TIMEOUT_S": "0"}
    ).wait_until_ready()
    asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
    damage(folder / "model.safetensors")
    assert httpx.post(server.base_url + "/v1/completions", json=asked).status_code == 200  # it has its own copy
    engine_of(server).send_signal(signal.SIGKILL)
    told = set()
    while server.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(server.base_url + "/health")
            told.add((answer.status_code, answer.json()["engine"].get("reason")))
        time.sleep(0.05)
    assert server.process.returncode == 1
    assert any(status == 503 and reason in (why or "") for status, why in told)
    ends = [line for line in server.logs().splitlines() if reason in line and "ERROR" in line]
    assert len(ends) == 3
    assert "3 starts in a row failed for such a reason" in ends[-1]


def test_requests_outlast_weights_that_are_away_for_a_while(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    weights, away = folder / "model.safetensors", tmp_path / "away"
    server = ServerProcess(tmp_path, str(folder), "--served-model-name", "tiny").wait_until_ready()
    try:
        weights.rename(away)
        engine_of(server).send_signal(signal.SIGKILL)
        wait_for(lambda: server.logs().count("holds no weights") >= 4)
        assert httpx.get(server.base_url + "/health").status_code == 503
        with ThreadPoolExecutor(1) as pool:
            asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
            waiting = pool.submit(httpx.post, server.base_url + "/v1/completions", json=asked, timeout=60)
            away.rename(weights)
            assert waiting.result().status_code == 200
    finally:
        server.stop()


def kill_engine(server: ServerProcess) -> None:
    """Kills the engine and waits until another one serves. /health answers 503 meanwhile, with the engine's state, and
    /live 200: no supervisor need start the server anew."""
    engine_of(server).send_signal(signal.SIGKILL)
    seen = [engine_health(server)]

    def is_back() -> bool:
        seen.append(engine_health(server))
        assert httpx.get(server.base_url + "/live").status_code == 200
        return seen[-1]["state"] == "serving" and any(each["state"] == "restarting" for each in seen)

    wait_for(is_back)
    assert {each["state"] for each in seen} <= {"serving", "restarting"}
    assert {each.get("reason") for each in seen} == {None, "the engine was killed by signal 9."}
    assert seen[-1]["silent_seconds"] < max(each["silent_seconds"] for each in seen)


def engine_health(server: ServerProcess) -> dict[str, Any]:
    answer = httpx.get(server.base_url + "/health")
    engine: dict[str, Any] = answer.json()["engine"]
    assert answer.status_code == (503 if engine["state"] == "restarting" else 200)
    return engine


def running_requests(server: ServerProcess) -> int:
    for line in httpx.get(server.base_url + "/metrics").text.splitlines():
        if line.startswith("vllm:num_requests_running{"):
            return int(float(line.rsplit(" ", 1)[1]))
    raise AssertionError("no such metric")


def test_hints_about_the_machine_are_said_once(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Not by each rank, nor by each engine."""
    folder, options = str(checkpoint("llama")), ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "64")
    without_kernels = {"CXX": "no-such-compiler", "QUIRE_CACHE_ROOT": str(tmp_path)}
    server = ServerProcess(tmp_path, folder, *options, env=without_kernels).wait_until_ready()
    kill_engine(server)
    server.stop()
    [hint] = [line for line in server.logs().splitlines() if "WARNING" in line and "CPU kernels are not" in line]
    assert " worker-tp0 " in hint


def test_everything_ends_when_the_frontend_is_killed(own_server: ServerProcess) -> None:
    engine = engine_of(own_server)
    [folder] = {Path(each.laddr).parent for each in engine.net_connections("unix") if "quire-" in str(each.laddr)}
    assert folder.is_dir()
    own_server.process.kill()
    wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    assert not folder.exists()


def test_sigint_ends_the_server_cleanly(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, str(checkpoint("llama"))).wait_until_ready()
    engine = engine_of(server)
    assert server.stop(signal.SIGINT) == 0
    assert not engine.is_running()
    assert "Traceback" not in server.logs()


EARLY = """
import importlib, os, pathlib, sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == "quire.frontend.cli.main":
            pathlib.Path(sys.argv[2]).touch()
            time.sleep(1000)

sys.meta_path.insert(0, Slow())
from quire.__main__ import main
main()
"""


def test_sigterm_ends_a_server_in_order_while_it_is_imported(tmp_path: Path) -> None:
    sign = tmp_path / "importing"
    with subprocess.Popen([sys.executable, "-c", EARLY, "serve", str(sign)]) as server:
        wait_for(sign.exists)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


ENDLESS = """
import os, pathlib, sys, time
from quire.frontend.cli.main import main
from quire.frontend.text.tokenizer import Tokenizer

def work_for_ever(file):
    def work(*args, **options):
        pathlib.Path(os.environ["WORKING"], file).touch()
        while True:
            time.sleep(1)
    return work

Tokenizer.encode_batch, Tokenizer.decode_batch = work_for_ever("encodes"), work_for_ever("decodes")
main()
"""


def test_threads_that_work_on_do_not_keep_a_server_from_sigterm(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), env={"WORKING": str(tmp_path)}, program=("-c", ENDLESS)
    ).wait_until_ready()
    engine = engine_of(server)
    bodies = {"/tokenize": {"prompt": "word " * 1000}, "/detokenize": {"tokens": [5] * 5000}}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(httpx.post, server.base_url + path, json=body) for path, body in bodies.items()]
        wait_for(lambda: (tmp_path / "encodes").exists() and (tmp_path / "decodes").exists())
        assert server.stop() == 0
        assert [answer.result().status_code for answer in answers] == [503, 503]
    assert not engine.is_running()
    assert "Traceback" not in server.logs()


def test_second_server_on_the_port_is_told_so(server: ServerProcess, checkpoint: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(checkpoint("llama"))]
    second = subprocess.run(
        [*command, "--host", "127.0.0.1", "--port", str(server.port)], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 1
    assert str(server.port) in second.stderr
    assert "--port" in second.stderr
    assert "Traceback" not in second.stderr


def test_script_that_dies_leaves_no_engine(checkpoint: Callable[..., Path]) -> None:
    script = (
        "import os, sys\nfrom quire import LLM\n"
        f"llm = LLM({str(checkpoint('llama'))!r})\n"
        "llm.generate('Hello')\n"
        "import psutil\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os._exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    pid = int(done.stdout.split()[-1])
    wait_for(lambda: not psutil.pid_exists(pid))


def test_no_shared_memory_is_left_behind() -> None:
    assert [name for name in os.listdir("/dev/shm") if name.startswith("quire")] == []
