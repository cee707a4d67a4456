"""Two engines of the demo model with drafts against one without: tools, reasoning, and engines that are killed."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.servers import ServerProcess
from tests.test_data_parallel import engines_of, metric
from tests.weather import QUESTION, WEATHER_FUNCTION

TOOLS = [{"type": "function", "function": WEATHER_FUNCTION}]
DRAFTS = '{"method": "ngram", "prompt_lookup_min": 1, "enable_adaptive_verification": false}'
WEATHER, SUM = [{"role": "user", "content": QUESTION}], [{"role": "user", "content": "What is 27 + 48?"}]
LONG = {"max_tokens": 700, "temperature": 0.9, "seed": 4, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "a tool that it may call": {"messages": WEATHER, "tools": TOOLS, "temperature": 0},
    "a tool that it must call": {"messages": WEATHER, "tools": TOOLS, "tool_choice": "required", "seed": 3},
    "this tool": {
        "messages": SUM, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 1.5, "seed": 9,
    },
    "three": {"messages": SUM, "n": 3, "temperature": 1.8, "seed": 5, "logprobs": True},
    "a budget": {"messages": SUM, "chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4},
    "a prediction": {"messages": WEATHER, "prediction": {"type": "content", "content": "It is 21 degrees"}, "seed": 1},
}  # fmt: skip


def start(folder: Any, *options: str) -> ServerProcess:
    parsers = ("--enable-auto-tool-choice", "--num-gpu-blocks-override", "512", "--max-model-len", "2048")
    return ServerProcess(folder, *parsers, *options)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    drafting = ("--data-parallel-size", "2", "--speculative-config", DRAFTS)
    both = [start(folder, "--spec-method", "off"), start(folder, *drafting)]
    try:
        yield [each.wait_until_ready() for each in both]
    finally:
        for each in both:
            each.stop()


def ask(server: ServerProcess, body: dict[str, Any]) -> Any:
    route = "completions" if "prompt" in body else "chat/completions"
    answer = httpx.post(f"{server.base_url}/v1/{route}", json={"max_tokens": 60, **body}, timeout=100)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            entry["logprob"] = pytest.approx(entry["logprob"], abs=1e-4)
    return choices


def num_accepted(server: ServerProcess) -> float:
    return sum(metric(server, "vllm:spec_decode_num_accepted_tokens_total").values())


def test_same_answers_in_all_forms(servers: list[ServerProcess]) -> None:
    plain, drafting = servers
    for kind, body in KINDS.items():
        for _ in range(2):  # both engines
            assert ask(drafting, body) == ask(plain, body), kind
    [choice] = ask(drafting, KINDS["a tool that it may call"])
    assert choice["finish_reason"] == "tool_calls"
    assert num_accepted(drafting) > 20
    assert num_accepted(plain) == 0


def test_streams_survive_kill_9_of_engines(servers: list[ServerProcess]) -> None:
    plain, drafting = servers
    bodies = [LONG | {"prompt": [5, 6, 7 + number]} for number in range(4)]
    bodies.append({"prompt": [5], "max_tokens": 700, "temperature": 0.9, "seed": 2, "structured_outputs": {
        "regex": "[a-z ]{650,660}"}})  # fmt: skip
    expected = [ask(plain, body) for body in bodies]
    victims = engines_of(drafting)
    assert len(victims) == 2
    before = num_accepted(drafting)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, drafting, body) for body in bodies]
        while num_accepted(drafting) < before + 100:
            assert not all(answer.done() for answer in answers), "too few drafts were right"
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    replays = metric(drafting, "quire:request_replays_total")
    assert sum(replays.values()) >= 1
