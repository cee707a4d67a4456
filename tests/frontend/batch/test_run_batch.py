"""The batch runner: good lines, bad lines, resuming, URLs, and memory that does not grow with the input."""

import asyncio
import contextlib
import http.server
import json
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from quire import AsyncLLM
from quire.core.config.engine_args import EngineArgs
from quire.core.config.observability import ProfilerConfig
from quire.core.errors import ConfigError, EngineDeadError
from quire.frontend.batch import files
from quire.frontend.batch import run_batch as module
from quire.frontend.batch.batch_server import BatchAnswer, BatchResponse, BatchServer
from quire.frontend.batch.config import BatchConfig
from quire.frontend.batch.files import read_lines
from quire.frontend.batch.output_file import OutputFile
from quire.frontend.batch.resuming import Hashes
from quire.frontend.batch.run_batch import BatchRun, run_batch
from quire.frontend.cli import run_batch as cli
from quire.frontend.flags.parser import CommandParser
from quire.frontend.launch.event_loop import EventLoopThread
from quire.frontend.progress import LoggedProgress, open_progress
from tests.limits import small_files

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def line(custom_id: str, url: str = TEXT, **body: Any) -> str:
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def answers(path: Path) -> dict[str, dict]:
    return {each["custom_id"]: each for each in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("tests")
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def args(checkpoint: Callable[..., Path]) -> EngineArgs:
    return EngineArgs.from_flat(
        model=str(checkpoint("llama")), served_model_name="tiny", device="cpu", num_gpu_blocks_override=256
    )


@pytest.fixture(scope="module")
def engine(args: EngineArgs, loop: EventLoopThread) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(args, usage="llm")
    yield llm
    loop.run(llm.aclose())


@pytest.fixture
def run(engine: AsyncLLM, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a batch on the module's engine; the runner's own would take seconds to start each time."""

    class Shared:
        @staticmethod
        def from_engine_args(args: EngineArgs, **options: Any) -> "Shared":
            return Shared()

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        async def aclose(self) -> None:
            """Does nothing, because other tests still need the engine."""

    monkeypatch.setattr(module, "AsyncLLM", Shared)

    def run(source: Path | str, target: Path | str, **options: Any) -> int:
        config = BatchConfig(input_file=str(source), output_file=str(target), **options)
        return loop.run(run_batch(EngineArgs(), config))

    return run


def test_a_batch_from_end_to_end(args: EngineArgs, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", prompt="Hello"), line("b", CHAT, messages=MESSAGES), ""])
    config = BatchConfig(input_file=str(source), output_file=str(tmp_path / "out.jsonl"))
    assert asyncio.run(run_batch(args, config)) == 0
    found = answers(tmp_path / "out.jsonl")
    assert set(found) == {"a", "b"}
    for answer in found.values():
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
        assert answer["response"]["body"]["usage"]["completion_tokens"] == 4
        assert answer["id"].startswith("batch_req_")
    assert found["a"]["response"]["body"]["object"] == "text_completion"
    assert found["b"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_vectors_scores_and_ranks(embedding_checkpoint: Path, tmp_path: Path) -> None:
    bodies = {
        "/v1/embeddings": {"input": ["a b", "a c"], "encoding_format": "float"},
        "/v1/score": {"text_1": "a b", "text_2": ["a b", "a c"]},
        "/score": {"text_1": "a b", "text_2": "a c"},
        "/v1/rerank": {"query": "a b", "documents": ["a c", "a b"]},
        "/v2/rerank": {"query": "a b", "documents": ["a c", "a b"]},
        "/pooling": {"input": "a b", "encoding_format": "float"},
    }
    lines = [json.dumps({"custom_id": url, "url": url, "body": body}) for url, body in bodies.items()]
    bad = {"custom_id": "x", "url": "/v1/embeddings", "body": {"input": "a", "encoding_format": "bytes"}}
    source = write(tmp_path / "in.jsonl", [*lines, json.dumps(bad)])
    args = EngineArgs.from_flat(model=str(embedding_checkpoint), device="cpu", num_gpu_blocks_override=256)
    assert asyncio.run(run_batch(args, BatchConfig(input_file=str(source), output_file=str(tmp_path / "out")))) == 0
    found = answers(tmp_path / "out")
    assert "base64" in found.pop("x")["error"]["message"]
    bodies = {url: answer["response"]["body"] for url, answer in found.items()}
    first, second = (each["embedding"] for each in bodies["/v1/embeddings"]["data"])
    cosine = sum(one * other for one, other in zip(first, second, strict=True))
    assert [each["score"] for each in bodies["/v1/score"]["data"]] == pytest.approx([1, cosine], abs=1e-5)
    assert [each["score"] for each in bodies["/score"]["data"]] == pytest.approx([cosine], abs=1e-5)
    for url in ("/v1/rerank", "/v2/rerank"):
        assert [each["index"] for each in bodies[url]["results"]] == [1, 0]
    assert bodies["/pooling"]["data"][0]["data"] == first


def test_a_profile_of_the_run_is_written(args: EngineArgs, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    profiler = ProfilerConfig(profiler="timeline", torch_profiler_dir=str(traces))
    args = replace(args, observability=replace(args.observability, profiler_config=profiler))
    source = write(tmp_path / "in.jsonl", [line("a", prompt="Hello")])
    assert asyncio.run(run_batch(args, BatchConfig(input_file=str(source), output_file=str(tmp_path / "out")))) == 0
    [trace] = traces.iterdir()
    assert [each["name"] for each in json.loads(trace.read_text())["traceEvents"]].count("step") == 4


def test_constraints_hold_for_each_line(run: Callable[..., int], tmp_path: Path) -> None:
    """Covers all forms of constraints; a schema that no grammar library can enforce fails only its own line."""
    schema = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
    free = {"max_tokens": 60, "ignore_eos": False, "temperature": 1, "seed": 1}
    as_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    lines = [
        line("format", CHAT, messages=MESSAGES, response_format=as_format, **{**free, "max_tokens": 300}),
        line("regex", prompt="a", structured_outputs={"regex": "[0-9]{4}"}, **free),
        line("choice", prompt="a", guided_choice=["left", "right"], **free),
        line("free", prompt="a"),
        line("wrong", prompt="a", structured_outputs={"json": {"uniqueItems": True}}, **free),
    ]
    assert run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl") == 0  # the run succeeded
    found = answers(tmp_path / "out.jsonl")
    choices = {name: answer["response"]["body"]["choices"][0] for name, answer in found.items() if name != "wrong"}
    assert isinstance(json.loads(choices["format"]["message"]["content"])["open"], bool)
    assert choices["regex"]["text"].isdigit()
    assert choices["choice"]["text"] in ("left", "right")
    assert choices["free"]["finish_reason"] == "length"
    assert found["wrong"]["response"]["status_code"] == 400
    assert "uniqueItems" in json.dumps(found["wrong"])


def test_unknown_fields_are_ignored_and_logged_once(
    run: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "in.jsonl", [line(name, prompt="a", temprature=1) for name in ("x", "y")])
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    [record] = [each for each in caplog.records if "temprature" in each.getMessage()]
    assert "Did you mean 'temperature'?" in record.getMessage()


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"day": {"enum": ["mon", "tue"]}}, "required": ["day"]},
    },
}


def test_the_options_of_conversations_hold_for_each_line(args: EngineArgs, tmp_path: Path) -> None:
    """The command line's flags of templates, calls and reasoning reach the answers, as on a server."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    words = ["--chat-template", template, "--reasoning-parser", "deepseek_r1"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--response-role", "oracle"]
    parser = CommandParser("quire run-batch", "")
    cli.add_arguments(parser)
    lines = [
        line("thought", CHAT, messages=MESSAGES),
        line("call", CHAT, messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=400, ignore_eos=False,
             temperature=1, seed=3, thinking_token_budget=4, parallel_tool_calls=False),
    ]  # fmt: skip
    words += ["--model", args.model.model, "--served-model-name", "tiny", "--device", "cpu"]
    source = write(tmp_path / "in.jsonl", lines)
    given = parser.parse_args(["-i", str(source), "-o", str(tmp_path / "out.jsonl"), *words])
    assert asyncio.run(run_batch(given.engine_args, given.batch_config, given.server_config)) == 0
    found = {name: answer["response"]["body"]["choices"][0] for name, answer in answers(tmp_path / "out.jsonl").items()}
    thought = found["thought"]["message"]
    assert thought["role"] == "oracle"
    assert thought["reasoning"]
    assert not thought["content"]
    [call] = found["call"]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["day"] in ("mon", "tue")


BAD_LINES = {
    "not json": ("{oops", 400, "not valid JSON"),
    "not utf-8": (b'{"custom_id": "\xff"}', 400, "UTF-8"),
    "no custom_id": ('{"url": "/v1/completions", "body": {}}', 400, "'custom_id' is required"),
    "custom_id of the wrong type": ('{"custom_id": 5, "url": "/v1/completions", "body": {}}', 400, "custom_id"),
    "url": (line("x", "/v1/moderations"), 404, "url must be one of"),
    "task": (json.dumps({"custom_id": "x", "url": "/v1/embeddings", "body": {"input": "a"}}), 400, "generate"),
    "method": (line("x").replace("POST", "GET"), 400, "method must be POST"),
    "model": (line("x", prompt="a", model="other"), 404, "'other' is not served"),
    "field": (line("x", prompt="a", temperature=-1), 400, "temperature"),
    "stream": (line("x", prompt="a", stream=True), 400, "stream must not be true"),
    "too long": (line("x", prompt="a", max_tokens=10**6), 400, "max_tokens"),
    "surrogate": (line("x", prompt="a").replace('"a"', '"\\ud800"'), 400, "surrogate"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_becomes_an_error_line(
    run: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    bad, status, said = BAD_LINES[name]
    raw = bad if isinstance(bad, bytes) else bad.encode()
    (tmp_path / "in.jsonl").write_bytes(raw + b"\n" + line("good", prompt="a").encode() + b"\n")
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    found = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    [good] = [each for each in found if each["error"] is None]
    [failed] = [each for each in found if each["error"] is not None]
    assert good["custom_id"] == "good"
    assert failed["custom_id"] == ("x" if b'"x"' in raw else None)
    assert failed["response"]["status_code"] == status
    assert said in failed["error"]["message"]
    assert failed["error"]["line"] == 1
    assert f"line 1 failed: {failed['error']['message']}" in caplog.messages
    assert failed["response"]["body"]["error"]["message"] == failed["error"]["message"]


class TestResume:
    def test_continues_a_half_written_output(self, run: Callable[..., int], tmp_path: Path) -> None:
        source = write(tmp_path / "in.jsonl", [line(f"r{i}", prompt=f"number {i}") for i in range(8)])
        target = tmp_path / "out.jsonl"
        assert run(source, target) == 0
        whole = target.read_bytes()
        lines = whole.splitlines(keepends=True)
        target.write_bytes(b"".join(lines[:3]) + lines[3][:20])
        assert run(source, target, resume=True) == 0
        assert target.read_bytes().startswith(b"".join(lines[:3]))
        assert len(target.read_text().splitlines()) == 8
        texts = {key: each["response"]["body"]["choices"][0]["text"] for key, each in answers(target).items()}
        before = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in map(json.loads, lines)}
        assert texts == before

    def test_failed_lines_run_again(self, run: Callable[..., int], tmp_path: Path) -> None:
        lines = [line("first", prompt="a"), line("b", prompt="b", model="not yet"), line("last", prompt="a")]
        source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        assert run(source, target) == 0
        good = [each for each in target.read_bytes().splitlines(keepends=True) if b'"error":null' in each]
        assert len(good) == 2
        write(source, [each.replace("not yet", "tiny") for each in lines])
        assert run(source, target, resume=True) == 0
        assert target.read_bytes().startswith(b"".join(good))
        assert [answer["error"] for answer in answers(target).values()] == [None] * 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]

    def test_requests_may_share_an_id(
        self, run: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As each line of some generators has: every line is answered, whatever the first run has done of it."""
        lines = [line("same", prompt=f"number {i // 2}") for i in range(8)]
        source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        assert run(source, target) == 0
        assert "custom_id an earlier line has: 7, such as 'same'; each is answered" in caplog.text
        whole = target.read_bytes().splitlines(keepends=True)
        assert sorted(json.loads(each)["line"] for each in whole) == list(range(1, 9))
        target.write_bytes(b"".join(whole[:3]))
        assert run(source, target, resume=True) == 0
        found = [json.loads(each) for each in target.read_text().splitlines()]
        assert len(found) == 8
        by_digest = {each["digest"]: [] for each in found}
        for each in found:
            by_digest[each["digest"]].append(each["response"]["body"]["choices"][0]["text"])
        assert sorted(map(len, by_digest.values())) == [2, 2, 2, 2]
        assert all(len(set(texts)) == 1 for texts in by_digest.values())

    def test_lines_may_move_and_a_changed_one_runs_again(self, run: Callable[..., int], tmp_path: Path) -> None:
        lines = [line(f"r{i}", prompt=f"number {i}") for i in range(3)]
        source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        assert run(source, target) == 0
        before = target.read_bytes()
        write(source, [lines[2], line("r0", prompt="another"), lines[1]])
        assert run(source, target, resume=True) == 0
        assert target.read_bytes().startswith(before)
        [added] = map(json.loads, target.read_bytes()[len(before) :].splitlines())
        assert (added["custom_id"], added["line"]) == ("r0", 2)

    def test_answers_without_digests_count_by_their_ids(self, run: Callable[..., int], tmp_path: Path) -> None:
        lines = [line(f"r{i}", prompt=f"number {i}") for i in range(3)] + [line("same", prompt="x")] * 2
        source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        assert run(source, target) == 0
        answered = {each["custom_id"]: each for each in map(json.loads, target.read_text().splitlines())}
        old = [{**answered[name], "digest": None, "line": None} for name in ("r1", "same")]
        write(target, [json.dumps(each) for each in old])
        assert run(source, target, resume=True) == 0
        ids = [json.loads(each)["custom_id"] for each in target.read_text().splitlines()][2:]
        assert sorted(ids) == ["r0", "r2", "same", "same"]

    def test_the_model_is_not_loaded_for_nothing(
        self,
        run: Callable[..., int],
        engine: AsyncLLM,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        source, target = (
            write(tmp_path / "in.jsonl", [line("a", prompt="a"), line("b", prompt="b")]),
            tmp_path / "out.jsonl",
        )
        assert run(source, target) == 0
        whole = target.read_bytes()

        async def start() -> None:
            raise AssertionError("the model was loaded")

        monkeypatch.setattr(engine, "start", start)
        with caplog.at_level("INFO", logger="quire"):
            assert run(source, target, resume=True) == 0
        assert "no request is left to answer: 2 were answered before" in caplog.messages
        assert target.read_bytes() == whole
        target.write_bytes(whole.splitlines(keepends=True)[0])
        with pytest.raises(AssertionError, match="was loaded"):
            run(source, target, resume=True)

    def test_a_file_that_exists_is_kept_unless_told(self, run: Callable[..., int], tmp_path: Path) -> None:
        source, target = write(tmp_path / "in.jsonl", [line("a", prompt="a")]), tmp_path / "out.jsonl"
        target.touch()  # an empty file, as mktemp makes it, holds nothing to lose
        assert run(source, target) == 0
        target.write_text("something else\n")
        with pytest.raises(ConfigError, match=r"exists\. --resume .* --overwrite"):
            run(source, target)
        assert target.read_text() == "something else\n"
        with pytest.raises(ConfigError, match="give one of them"):
            run(source, target, overwrite=True, resume=True)
        assert run(source, target, overwrite=True) == 0
        assert set(answers(target)) == {"a"}

    def test_refuses_what_is_no_output_of_a_batch(self, run: Callable[..., int], tmp_path: Path) -> None:
        source = write(tmp_path / "in.jsonl", [line("a", prompt="a")])
        (tmp_path / "out.jsonl").write_text("something else\n")
        with pytest.raises(ConfigError, match=r"line 1 of .* is no answer of a batch"):
            run(source, tmp_path / "out.jsonl", resume=True)
        assert (tmp_path / "out.jsonl").read_text() == "something else\n"
        with pytest.raises(ConfigError, match="a URL cannot be continued"):
            run(source, "http://localhost/x", resume=True)


def test_files_and_folders_that_do_not_exist(run: Callable[..., int], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [])
    with pytest.raises(ConfigError, match=r"--input-file: there is no file"):
        run(tmp_path / "no.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=r"--input-file: .* is a folder"):
        run(tmp_path, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=r"--output-file: there is no folder"):
        run(source, tmp_path / "no" / "out.jsonl")
    same = tmp_path / "link.jsonl"
    same.symlink_to(source)
    for output in (source, same, tmp_path / "." / ".." / tmp_path.name / "in.jsonl"):
        with pytest.raises(ConfigError, match="must differ"):
            run(source, output)


HOSTILE = {
    "/elsewhere": "not public",  # a redirect to another private host
    "/away": "scheme 'ftp' is not allowed",
    "/loop": "more redirects than 10",
    "/large": "more than 5000 bytes",
    "/endless": "more than 5000 bytes",
    "/half": "peer closed connection",
}
"""Answers of a server that means ill, and what is said of them."""


class Store(http.server.ThreadingHTTPServer):
    """Serves one file by GET and keeps what is PUT, insisting on a length as signed URLs do."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), StoreHandler)
        self.content = content
        self.received: bytes | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


class StoreHandler(http.server.BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        if self.path in HOSTILE:
            self._answer_hostile()
            return
        self.send_response(200 if self.path == "/in" else 404)
        self.end_headers()
        self.wfile.write(self.server.content)

    def _answer_hostile(self) -> None:
        port = self.server.server_port
        goal = {"/elsewhere": f"http://localhost:{port}/in", "/away": "ftp://127.0.0.1/x", "/loop": "/loop"}.get(
            self.path
        )
        self.send_response(200 if goal is None else 302)
        if goal is not None:
            self.send_header("Location", goal)
        if self.path != "/endless":
            self.send_header("Content-Length", {"/large": "6000", "/half": "4000"}.get(self.path, "0"))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has had enough
            self.wfile.write(b"x" * {"/large": 6000, "/endless": 10_000_000, "/half": 100}.get(self.path, 0))

    def do_PUT(self) -> None:
        if self.path == "/moved":
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(302)
            self.send_header("Location", "/out")
            self.end_headers()
            return
        if "Content-Length" not in self.headers or self.path != "/out":
            self.send_error(411)
            return
        self.server.received = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(f"{line('a', prompt='a')}\n{line('b', prompt='b')}\n".encode()) as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield store
        store.shutdown()
        thread.join()


def test_urls_at_both_ends(run: Callable[..., int], store: Store, tmp_path: Path) -> None:
    assert run(f"{store.url}/in", f"{store.url}/out") == 0
    assert store.received is not None
    assert {json.loads(each)["custom_id"] for each in store.received.splitlines()} == {"a", "b"}
    with pytest.raises(ConfigError, match=r"downloading .* failed"):
        run(f"{store.url}/missing", tmp_path / "out.jsonl")


@pytest.mark.parametrize("path", HOSTILE)
def test_a_hostile_url_is_no_way_elsewhere_and_fills_no_disk(
    run: Callable[..., int], store: Store, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = replace(files._RULES, max_bytes=5000)
    monkeypatch.setattr(files, "_RULES", rules)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=HOSTILE[path]):
        run(store.url + path, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == [], "nothing of it is left"


def test_an_upload_follows_no_redirect(run: Callable[..., int], store: Store) -> None:
    """The answers go to the URL that was named, or stay here."""
    with pytest.raises(ConfigError, match=r"302.*The answers are in (.*)") as caught:
        run(f"{store.url}/in", f"{store.url}/moved")
    assert store.received is None
    Path(str(caught.value).split("The answers are in ")[1].rstrip(".")).unlink()


def test_an_input_that_the_disk_does_not_take_is_told(run: Callable[..., int], store: Store, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"--input-file: .* cannot be kept in .*File too large.*TMPDIR"),
        small_files(10),
    ):
        run(f"{store.url}/in", tmp_path / "out.jsonl")


def test_answers_survive_a_failed_upload(run: Callable[..., int], store: Store) -> None:
    with pytest.raises(ConfigError, match=r"The answers are in (.*)") as caught:
        run(f"{store.url}/in", f"{store.url}/wrong")
    kept = Path(str(caught.value).split("The answers are in ")[1].rstrip("."))
    assert set(answers(kept)) == {"a", "b"}
    kept.unlink()


# ------------------------------------------------------------------------------------------------------ many requests


class Usage(Struct):
    prompt_tokens: int = 1
    total_tokens: int = 2


class Body(Struct):
    usage: Usage


class Instant(BatchServer):
    """Answers without an engine, to test the runner alone. Fails permanently at line `dies_at`."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.in_flight = self.most = 0
        self._dies_at = dies_at

    async def answer(self, number: int, line: bytes) -> BatchAnswer:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if number == self._dies_at:
            raise EngineDeadError("gone")
        return BatchAnswer(f"id{number}", f"c{number}", BatchResponse(200, "r", Body(Usage())))


def run_alone(server: BatchServer, source: Path, target: Path, *, resume: bool = False) -> BatchRun:
    async def work() -> BatchRun:
        output = OutputFile(target, resume=resume)
        with open_progress("x", None, show=False) as progress:
            run = BatchRun(server, output, 32, progress)
            try:
                await run.run(source, output.answers.match(source))
            finally:
                output.close()
        return run

    return asyncio.run(work())


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        lines = [json.dumps({"custom_id": f"c{i}", "x": "y" * 200}) for i in range(count)]
        source = write(tmp_path / f"{count}.jsonl", lines)
        del lines
        server = Instant()
        tracemalloc.start()
        run = run_alone(server, source, tmp_path / "out.jsonl")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert run.num_succeeded == count
        assert server.most <= 32
        return peak

    small, large = peak(500), peak(5000)
    assert large < small + 300_000  # the larger input alone is more than a megabyte


def test_a_dead_engine_ends_the_run_and_keeps_what_is_done(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [json.dumps({"custom_id": f"c{i + 1}"}) for i in range(500)])
    with pytest.raises(EngineDeadError):
        run_alone(Instant(dies_at=100), source, tmp_path / "out.jsonl")
    done = len((tmp_path / "out.jsonl").read_text().splitlines())
    assert 60 < done < 200
    run = run_alone(Instant(), source, tmp_path / "out.jsonl", resume=True)
    assert run.num_skipped == done
    assert len(answers(tmp_path / "out.jsonl")) == 500


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="quire"):
        seldom, often = LoggedProgress(3, interval=1000), LoggedProgress(3, interval=0)
        for progress in (seldom, often):
            for _ in range(3):
                progress.advance(5)
    said = [record.getMessage().split(",")[0] for record in caplog.records]
    assert said == ["requests done: 3 of 3", *(f"requests done: {number} of 3" for number in (1, 2, 3))]


def test_an_answer_that_cannot_be_written_whole_ends_the_run_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = OutputFile(path, resume=False)
    says = rf"cannot write '{path}'.*--resume"
    with contextlib.closing(output), pytest.raises(ConfigError, match=says), small_files(100):
        output.write(b"x" * 101)


def test_hashes_are_taken_as_often_as_they_are_there() -> None:
    hashes = Hashes(f"key-{i % 1000}" for i in range(1500))
    assert [hashes.count(f"key-{i}") for i in (0, 499, 500, 999, 1000)] == [2, 2, 1, 1, 0]
    assert [hashes.take("key-3") for _ in range(3)] == [True, True, False]
    assert [hashes.take(f"key-{i}") for i in (999, 999, 1000)] == [True, False, False]
    assert (len(hashes), hashes.num_repeated) == (1500, 500)


def test_blank_lines_are_skipped_and_numbers_count_them(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\n\n  \r\nb")
    assert list(read_lines(tmp_path / "in")) == [(1, b"a\n"), (4, b"b")]


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"b": 2}\n')
    assert list(read_lines(path)) == [(1, b'{"a": 1}\n'), (3, b'{"b": 2}\n')]
