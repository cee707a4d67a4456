"""Errors in a checkpoint or a request are reported in one clear line, and do not disturb other requests."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.servers import ServerProcess, free_port

# ---------------------------------------------------------------------------------------------------------- checkpoints


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def configure(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (truncate_weights, "model.safetensors is corrupt or cut short"),
    "no weights": (remove("model.safetensors"), "holds no weights"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "There is no tokenizer"),
    "broken tokenizer": (overwrite("tokenizer.json", '{"model": '), "tokenizer.json"),
    "no config": (remove("config.json"), "has no config.json"),
    "config that is no JSON": (overwrite("config.json", '{"architectures": ['), "config.json"),
    "unknown architecture": (configure(architectures=["ParrotForCausalLM"]), " LlamaForCausalLM, "),
    "config of the wrong type": (configure(hidden_size="big"), "hidden_size must be a positive whole number"),
    "rope of the wrong type": (configure(rope_parameters=5), "rope_parameters must be an object"),
    "EOS of the wrong type": (configure(eos_token_id="</s>"), "eos_token_id must be a token id"),
    "config with deep brackets": (overwrite("config.json", '{"a": ' + "[" * 200_000), "its brackets nest too deeply"),
    "a pipe for the config": (pipe("config.json"), "config.json is a named pipe, where a file belongs"),
    "a pipe for the weights": (pipe("model.safetensors"), "model.safetensors is a named pipe, where a file belongs"),
    "10^9 layers": (configure(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; models have at most 16384"),
    "a table of other files": (
        overwrite("gguf.json", '{"architecture": "llama", "files": ["/etc/hostname"], "tensors": {}}'),
        "gguf.json is a table of files elsewhere",
    ),
    "a table of no files": (
        overwrite("gguf.json", '{"architecture": "llama", "files": [], "tensors": {}}'),
        "gguf.json is a table of a GGUF model without files",
    ),
    "quantized in an unknown way": (configure(quantization_config={"quant_method": "exl3"}), "quantized (exl3)"),
}


def refused(*arguments: str) -> str:
    """The output of `quire serve ARGUMENTS`, which must end with 1 and leave neither process nor socket."""
    with tempfile.TemporaryDirectory(prefix="q") as sockets:  # socket paths must be short
        ended = subprocess.run(
            [sys.executable, "-m", "quire", "serve", *arguments, "--host", "127.0.0.1", "--port", str(free_port())],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"QUIRE_RPC_BASE_PATH": sockets},
        )
        assert ended.returncode == 1
        assert not os.listdir(sockets)
        assert not [process for process in psutil.process_iter() if _environment(process) == sockets]
    assert ended.stdout == ""
    return ended.stderr


def _environment(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("QUIRE_RPC_BASE_PATH")
    except psutil.Error:
        return None


@pytest.mark.turns(4)
@pytest.mark.parametrize("fault", CHECKPOINTS)
def test_bad_checkpoint_is_told_in_one_line(checkpoint: Callable[..., Path], tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint("llama"), folder)
    change, message = CHECKPOINTS[fault]
    change(folder)
    # Meanwhile the engine may have begun to load.
    [line] = [line for line in refused(str(folder)).splitlines() if " INFO " not in line]
    assert line.startswith("quire serve: ")
    assert message in line


def test_path_that_is_no_checkpoint_is_told(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    assert "name the folder that holds it" in refused(str(folder / "config.json"))
    assert f"Did you mean {str(folder)!r}?" in refused(f"{folder}x")


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--override-generation-config", '{"temperature": "hot"}'], "temperature must be a finite number"),
        (["--chat-template", "{% if"], "--chat-template: The chat template is no valid Jinja"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], "must be PEM files"),
        (["--max-model-len", "1000000"], "exceeds the checkpoint's own limit of 2048"),
        (["--tokenizer", "/nowhere"], "--tokenizer: there is no folder '/nowhere'"),
        (["--lora-modules", "x=/nowhere"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "x=/nowhere"], "--lora-modules: The adapter 'x' is not there: '/nowhere'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_option_that_does_not_go_with_the_model_is_told(
    checkpoint: Callable[..., Path], arguments: list[str], message: str
) -> None:
    # Meanwhile the engine may have begun to load.
    [line] = [line for line in refused(str(checkpoint("llama")), *arguments).splitlines() if " INFO " not in line]
    assert message in line


# ------------------------------------------------------------------------------------------------------------- requests

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, BATCH = "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "Hello", "max_tokens": 1},
    CHAT: {"model": "tiny", "messages": HELLO, "max_tokens": 1},
    RESPONSES: {"model": "tiny", "input": "Hello", "max_output_tokens": 1},
    MESSAGES: {"model": "tiny", "messages": HELLO, "max_tokens": 1},
    MESSAGES + "/count_tokens": {"model": "tiny", "messages": HELLO},
    BATCH: {"messages": [HELLO, HELLO], "max_tokens": 1},
    CHAT + "/render": {"messages": HELLO},
    COMPLETIONS + "/render": {"prompt": "Hello"},
    "/invocations": {"prompt": "Hello", "max_tokens": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
}

STREAMING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, "/invocations")

LONG = "word " * 100_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIELDS: list[tuple[str, str, Any, str]] = [
    # path, field, value, a part of the message
    (COMPLETIONS, "prompt", "word " * 9000, "limited to 2048"),
    (COMPLETIONS, "prompt", LONG, "characters, which are at least"),
    (COMPLETIONS, "prompt", [5] * 1_000_000, "1000000 tokens"),
    (COMPLETIONS, "prompt", [5] * 2048, "at most 2047 tokens"),
    (COMPLETIONS, "prompt", "", "at least one token"),
    (COMPLETIONS, "prompt", [], "must not be an empty list"),
    (COMPLETIONS, "prompt", [[]], "at least one token"),
    (COMPLETIONS, "prompt", [320], "0 to 319"),
    (COMPLETIONS, "prompt", [-1], "0 to 319"),
    (COMPLETIONS, "prompt", [2**70], "0 to 319"),
    (COMPLETIONS, "prompt", [[5], [999]], "0 to 319"),
    (COMPLETIONS, "prompt", [5, "a"], "not a mixture"),
    (COMPLETIONS, "prompt", {"text": "a"}, "got object"),
    (COMPLETIONS, "prompt", [[5]] * 16385, "16384"),
    (COMPLETIONS, "max_tokens", -1, "between 1 and"),
    (COMPLETIONS, "max_tokens", 0, "between 1 and"),
    (COMPLETIONS, "max_tokens", 10**9, "lower max_tokens to 2044"),
    (COMPLETIONS, "max_tokens", 10**30, "between 1 and"),
    (COMPLETIONS, "max_tokens", 1.5, "got float"),
    (COMPLETIONS, "max_tokens", "five", "got str"),
    (COMPLETIONS, "temperature", -0.1, "at least 0"),
    (COMPLETIONS, "temperature", "hot", "got str"),
    (COMPLETIONS, "top_p", 0, "above 0"),
    (COMPLETIONS, "top_p", 1.1, "between 0.0 and 1.0"),
    (COMPLETIONS, "top_k", -2, "between -1 and"),
    (COMPLETIONS, "min_p", 2, "between 0.0 and 1.0"),
    (COMPLETIONS, "presence_penalty", 3, "between -2.0 and 2.0"),
    (COMPLETIONS, "frequency_penalty", -3, "between -2.0 and 2.0"),
    (COMPLETIONS, "repetition_penalty", 0, "between 1e-06 and"),
    (COMPLETIONS, "repetition_penalty", 1e300, "between 1e-06 and"),
    (COMPLETIONS, "n", 0, "between 1 and 16384"),
    (COMPLETIONS, "n", 10**6, "between 1 and 16384"),
    (COMPLETIONS, "seed", 2**70, "between"),
    (COMPLETIONS, "stop", [""], "must not hold an empty string"),
    (COMPLETIONS, "stop", [5], "got int"),
    (COMPLETIONS, "stop", [str(number) for number in range(1025)], "at most 1024"),
    (COMPLETIONS, "stop", "a" * 70_000, "longer than 65536 characters"),
    (COMPLETIONS, "stop_token_ids", [-1], "0 to 319"),
    (COMPLETIONS, "stop_token_ids", [10**6], "0 to 319"),
    (COMPLETIONS, "logprobs", 21, "at most 20"),
    (COMPLETIONS, "logprobs", -1, "at most 20"),
    (COMPLETIONS, "min_tokens", 2, "must not exceed max_tokens (1)"),
    (COMPLETIONS, "stream", "yes", "got str"),
    (COMPLETIONS, "stream_options", {"include_usage": True}, "needs stream=true"),
    (COMPLETIONS, "logit_bias", {"5": 101}, "between -100 and 100"),
    (COMPLETIONS, "cache_salt", "", "must not be empty"),
    (CHAT, "messages", [], "must not be empty"),
    (CHAT, "messages", "Hello", "got str"),
    (CHAT, "messages", [{}], "with a role"),
    (CHAT, "messages", [{"role": 5, "content": "a"}], "with a role"),
    (CHAT, "messages", [{"role": "user", "content": 5}], "string or a list of parts"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "text only"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": {}}]}], "text only"),
    (CHAT, "messages", [{"role": "assistant", "content": "", "tool_calls": 5}], "must be a list"),
    (CHAT, "messages", [{"role": "user", "content": "word " * 9000}], "limited to 2048"),
    (CHAT, "messages", [{"role": "user", "content": LONG}], "characters, which are at least"),
    (CHAT, "max_completion_tokens", -3, "max_completion_tokens must be between 1 and"),
    (CHAT, "max_completion_tokens", 0, "max_completion_tokens must be between 1 and"),
    (CHAT, "max_completion_tokens", 10**9, "lower max_completion_tokens to"),
    (CHAT, "max_completion_tokens", 1.5, "got float"),
    (CHAT, "max_tokens", 10**9, "lower max_tokens to"),
    (CHAT, "top_logprobs", 3, "needs logprobs=true"),
    (CHAT, "tools", [{}], "function with a name"),
    (CHAT, "response_format", {"type": []}, "response_format"),
    (CHAT, "tool_choice", "required", "there are no tools"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}, "not among the tools"),
    (CHAT, "tool_choice", "any", "must be none, auto, required"),
    (CHAT, "tools", [TOOL, TOOL], "two functions called 'f'"),
    (CHAT, "messages", [{"role": "tool", "tool_call_id": "1", "content": "a"}], "no earlier assistant message"),
    (CHAT, "messages", [{"role": "tool", "tool_call_id": {}, "content": "a"}], "tool_call_id must be a string"),
    (CHAT, "messages", [{"role": "x" * 10**6, "content": "a"}], "characters, which are at least"),
    (CHAT, "n", 0, "between 1 and 16384"),
    (CHAT, "stop", ["a" * 60_000] * 5, "more than 262144"),
    (RESPONSES, "input", [], "must not be empty"),
    (RESPONSES, "input", LONG, "characters, which are at least"),
    (RESPONSES, "input", 5, "got int"),
    (RESPONSES, "input", [{"role": "robot", "content": "a"}], "a role out of"),
    (RESPONSES, "input", [{"type": "function_call_output", "call_id": "1", "output": "a"}], "no earlier"),
    (RESPONSES, "input", [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}], "a string"),
    (RESPONSES, "max_output_tokens", 0, "max_output_tokens must be between 1 and"),
    (RESPONSES, "max_output_tokens", -1, "max_output_tokens must be between 1 and"),
    (RESPONSES, "max_output_tokens", 10**9, "lower max_output_tokens to"),
    (RESPONSES, "max_output_tokens", 10**30, "max_output_tokens must be between 1 and"),
    (RESPONSES, "max_output_tokens", 1.5, "got float"),
    (RESPONSES, "max_output_tokens", "five", "got str"),
    (RESPONSES, "max_tool_calls", -1, "at least 1"),
    (RESPONSES, "max_tool_calls", 1.5, "got float"),
    (RESPONSES, "max_tool_calls", 0, "at least 1"),
    (RESPONSES, "include", ["everything"], "include can name"),
    (RESPONSES, "top_logprobs", 3, "needs message.output_text.logprobs"),
    (RESPONSES, "text", {"format": {"type": "json_schema"}}, "needs a schema"),
    (RESPONSES, "tool_choice", {"type": "file_search"}, "not supported"),
    (RESPONSES, "stop", ["a" * 60_000] * 5, "more than 262144"),
    (BATCH, "messages", HELLO, "got object"),
    (BATCH, "messages", [[]], "must not be empty"),
    (BATCH, "messages", [HELLO, [{"role": 5}]], "with a role"),
    (BATCH, "messages", [[]] * 16385, "between 1 and 16384"),
    (BATCH, "n", 2, "single conversations"),
    (CHAT + "/render", "messages", [{}], "with a role"),
    (COMPLETIONS + "/render", "prompt", [-1], "-1 in the prompt"),
    (COMPLETIONS + "/render", "prompt", "word " * 9000, "limited to 2048"),
    (CHAT + "/render", "messages", [{"role": "user", "content": "word " * 9000}], "limited to 2048"),
    ("/invocations", "prompt", [-1], "-1 in the prompt"),
    ("/tokenize", "prompt", 5, "got int"),
    ("/tokenize", "tools", [TOOL], "goes with messages"),
    ("/detokenize", "tokens", [-1], "does not know"),
    ("/detokenize", "tokens", [2**70], "does not know"),
    ("/detokenize", "tokens", "a", "got str"),
    (CHAT, "chat_template", "{{ messages }}", "--trust-request-chat-template"),
    (CHAT, "reasoning_effort", "huge", "invalid enum value"),
    (CHAT, "chat_template_kwargs", {"messages": []}, "must not set 'messages'"),
]

BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "empty"),
    (b"{", 400, "truncated"),
    (b"[]", 400, "expected object, got array"),
    (b'{"prompt": "a",}', 400, "trailing comma"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "NaN and Infinity are not JSON numbers"),
    (b'{"prompt": "a", "temperature": -Infinity}', 400, "NaN and Infinity are not JSON numbers"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "out of range"),
    (b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
    (b'{"prompt": "\xed\xa0\x80"}', 400, "not valid UTF-8 (byte 12)"),
    (b"\xff\xfe", 400, "not valid JSON"),
    (b"[" * 100_000, 400, "expected object"),
    (b'{"metadata": ' + b"[" * 100_000, 400, "nested too deeply"),
    (b'{"prompt": "' + b"a" * 10 * 2**20 + b'"}', 413, "--max-request-body-bytes"),
]

ANTHROPIC_FIELDS: list[tuple[str, Any, str]] = [
    # field, value, a part of the message
    ("messages", [], "messages must not be empty"),
    ("messages", [{"role": "user", "content": LONG}], "characters, which are at least"),
    ("messages", [{"role": "robot", "content": "a"}], "invalid enum value 'robot'"),
    ("messages", [{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0] is of type 'image'"),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}], "no earlier"),
    ("max_tokens", 0, "max_tokens must be between 1 and"),
    ("max_tokens", -1, "max_tokens must be between 1 and"),
    ("max_tokens", 10**30, "max_tokens must be between 1 and"),
    ("max_tokens", 1.5, "max_tokens: expected int, got float"),
    ("max_tokens", "five", "max_tokens: expected int, got str"),
    ("max_tokens", None, "max_tokens"),
    ("stop_sequences", [""], "stop_sequences must not hold an empty string"),
    ("stop_sequences", ["a"] * 2000, "stop_sequences holds 2000 strings"),
    ("temperature", -1, "temperature must be at least 0"),
    ("temperature", "hot", "temperature: expected float"),
    ("tool_choice", {"type": "tool"}, "needs a name"),
    ("tool_choice", {"type": "any"}, "there are no tools"),
    ("tools", [{"name": "f"}], "tools[0] must have a name and an input_schema"),
    ("thinking", {"type": "enabled", "budget_tokens": 5}, "at least 1024"),
]

ROUTES: list[tuple[str, str, int]] = [
    ("GET", "/v1/completions", 405),
    ("DELETE", "/v1/models", 405),
    ("POST", "/health", 405),
    ("GET", "/v1/nowhere", 404),
    ("GET", "/v1/models/other", 404),
]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60, headers={"Content-Type": "application/json"}) as client:
        yield client


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_behind(server: ServerProcess, client: httpx.Client) -> Iterator[None]:
    """After all tests, the server still serves, holds no page, and has logged no traceback."""
    yield
    for path, body in GOOD.items():
        assert client.post(path, json=body).status_code == 200
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + 60
    while any(gauge(client, name) for name in gauges):
        assert time.monotonic() < deadline, "a request still runs, or its pages are still held"
        time.sleep(0.02)
    assert "Traceback" not in server.logs()


def gauge(client: httpx.Client, name: str) -> float:
    [line] = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return float(line.rsplit(" ", 1)[1])


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"].endswith("Error")
    return error


SPACES = " " * 8_000_000
SPOKEN = [{"role": "user", "content": SPACES}]
HUGE: list[tuple[str, dict[str, Any], str]] = [
    # path, fields, a part of the message
    ("/tokenize", {"prompt": SPACES}, "prompt has 8000000 characters, which are at least"),
    ("/tokenize", {"prompt": None, "messages": SPOKEN}, "messages has 8000"),
    ("/detokenize", {"tokens": [5] * 4_000_000}, "tokens holds 4000000 ids; at most 1048576"),
    (COMPLETIONS, {"prompt": SPACES}, "prompt has 8000000 characters, which are at least"),
    (COMPLETIONS, {"prompt": SPACES, "truncate_prompt_tokens": 4}, "8000000 characters; at most 1048576"),
    (COMPLETIONS, {"prompt": [SPACES], "truncate_prompt_tokens": -1}, "8000000 characters; at most 1048576"),
    (COMPLETIONS, {"suffix": SPACES, "truncate_prompt_tokens": 4}, "suffix has 8000000 characters; at most 1048576"),
    (COMPLETIONS + "/render", {"prompt": SPACES}, "at least"),
    ("/invocations", {"prompt": SPACES, "truncate_prompt_tokens": 4}, "at most 1048576"),
    (CHAT, {"messages": SPOKEN}, "at least"),
    (CHAT, {"messages": SPOKEN, "truncate_prompt_tokens": 4}, "at most 1048576"),
    (CHAT + "/render", {"messages": SPOKEN}, "at least"),
    (BATCH, {"messages": [SPOKEN], "truncate_prompt_tokens": 4}, "at most 1048576"),
    (RESPONSES, {"input": SPACES}, "at least"),
    (RESPONSES, {"input": SPACES, "truncation": "auto"}, "at most 1048576"),
    (MESSAGES, {"messages": SPOKEN}, "at least"),
    (MESSAGES + "/count_tokens", {"messages": SPOKEN}, "at least"),
]


@pytest.mark.parametrize(
    ("path", "fields", "message"), HUGE, ids=[f"{path} {[*fields][-1]}" for path, fields, _ in HUGE]
)
def test_a_text_of_megabytes_is_refused_before_it_costs_anything(
    server: ServerProcess, client: httpx.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    body = {name: value for name, value in (GOOD[path] | fields).items() if value is not None}
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    answer = client.post(path, json=body)
    after = process.cpu_times()
    error = (anthropic_error_of if path.startswith(MESSAGES) else error_of)(answer, 400)
    assert message in error["message"]
    assert after.user + after.system - before.user - before.system < 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "value", "message"), FIELDS, ids=[f"{row[1]}={str(row[2])[:20]}" for row in FIELDS]
)
def test_bad_field_is_named(
    client: httpx.Client, path: str, field: str, value: Any, message: str, stream: bool
) -> None:
    if stream and path not in STREAMING:
        pytest.skip("no such answer")
    body = {**GOOD[path], **({"stream": True} if stream and field != "stream_options" else {}), field: value}
    error = error_of(client.post(path, json=body), 400)
    assert error["param"].startswith(field)
    assert message in error["message"]


def anthropic_error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == {400: "invalid_request_error", 413: "request_too_large"}[status]
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "message"), ANTHROPIC_FIELDS, ids=[f"{row[0]}={str(row[1])[:20]}" for row in ANTHROPIC_FIELDS]
)
def test_bad_field_of_a_message_is_named(
    client: httpx.Client, field: str, value: Any, message: str, stream: bool
) -> None:
    answer = client.post(MESSAGES, json={**GOOD[MESSAGES], "stream": stream, field: value})
    assert message in anthropic_error_of(answer, 400)["message"]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(("body", "status", "message"), BODIES, ids=[str(row[0][:24]) for row in BODIES])
def test_bad_body_is_explained(client: httpx.Client, path: str, body: bytes, status: int, message: str) -> None:
    answer = client.post(path, content=body)
    error = (anthropic_error_of if path.startswith(MESSAGES) else error_of)(answer, status)
    assert message in error["message"] or path != COMPLETIONS  # other routes report other fields first
    assert len(answer.content) < 10_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "x" * 2**20: 1, "n": 0},
        {"prompt": "a", "model": "x" * 2**20},
        {"prompt": "a", "prompt_logprobs": "x" * 2**20, "stream": False},
    ],
    ids=["field", "model", "value"],
)
def test_long_words_of_a_client_are_not_repeated_whole(client: httpx.Client, body: dict[str, Any]) -> None:
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 10_000


def test_lists_are_priced_by_the_completions_that_hold_them(client: httpx.Client) -> None:
    ids, prompts = {"allowed_token_ids": [5] * 100_000}, {"prompt": ["a"] * 16_000}
    for field, wide in ((ids, {"n": 16_000}), (ids, prompts), ({"stop": "a" * 1000}, prompts)):
        error = error_of(client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], **field, **wide}), 400)
        assert error["param"] in field
        assert "for 16000 completion(s)" in error["message"]
    body = {**GOOD[BATCH], **ids, "messages": [HELLO] * 16_000}
    assert error_of(client.post(BATCH, json=body), 400)["param"] == "allowed_token_ids"


def test_bad_requests_disturb_no_stream(client: httpx.Client) -> None:
    """A stream that runs during all bad requests has the same output as alone."""
    body = {"model": "tiny", "prompt": "on and on", "max_tokens": 400, "ignore_eos": True, "seed": 3, "stream": True}

    def read(lines: Iterator[str]) -> str:
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    with client.stream("POST", COMPLETIONS, json=body) as alone:
        expected = read(alone.iter_lines())
    with client.stream("POST", COMPLETIONS, json=body) as beside:
        lines = beside.iter_lines()
        first = next(lines)
        for path in GOOD:
            for bad, *_ in BODIES:
                assert client.post(path, content=bad).status_code < 500
        assert read(iter([first, *lines])) == expected


def test_bad_body_in_chunks_is_explained(client: httpx.Client) -> None:
    cut = error_of(client.post(COMPLETIONS, content=iter([b'{"prompt":', b' "a"'])), 400)
    assert "truncated" in cut["message"]
    endless = error_of(client.post(COMPLETIONS, content=(b"a" * 2**16 for _ in range(160))), 413)
    assert "--max-request-body-bytes" in endless["message"]


@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_wrong_route_or_method_is_told(client: httpx.Client, method: str, path: str, status: int) -> None:
    assert error_of(client.request(method, path), status)["message"]


def test_odd_but_good_requests_are_served(client: httpx.Client) -> None:
    odd = [
        {"stop": [str(number) for number in range(1000)]},
        {"temperature": 1e308},
        {"prompt": "\0\x01\ufffe"},
        {"seed": -5},
        {"n": 100},
        {"request_id": "x" * 10_000},
    ]
    for fields in odd:
        answer = client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | fields)
        assert answer.status_code == 200, (fields, answer.text)


def test_openai_client_raises_its_own_errors(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="a", max_tokens=-1)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
            client.completions.create(model="other", prompt="a")
