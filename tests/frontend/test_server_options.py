"""What options of a server change in its answers: a budget for reasoning."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.servers import ServerProcess

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking is not defined %}<think>\n{% endif %}"
)
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def reasoner(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tokens of their own for the marks of reasoning."""
    root = tmp_path_factory.mktemp("reasoner")
    folder = shutil.copytree(checkpoint("llama", vocab_size=330), root / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(reasoner: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("options"), str(reasoner), "--reasoning-parser", "qwen3",
        "--num-gpu-blocks-override", "128",
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="module")
def marks(reasoner: Path) -> tuple[int, int]:
    """Ids of the marks that begin and end reasoning."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reasoner)
    return tokenizer.convert_tokens_to_ids("<think>"), tokenizer.convert_tokens_to_ids("</think>")


def ask(served: ServerProcess, path: str, **body: Any) -> Any:
    answer = httpx.post(served.base_url + path, json={**GREEDY, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def chat(served: ServerProcess, **body: Any) -> Any:
    return ask(served, "/v1/chat/completions", messages=[{"role": "user", "content": "Why?"}], max_tokens=30, **body)


class TestThinkingBudget:
    def test_a_chat_has_its_reasoning_closed(self, served: ServerProcess, marks: tuple[int, int]) -> None:
        free = chat(served)
        assert marks[1] not in free["token_ids"]
        assert (free["message"]["content"], free["message"]["reasoning"] is None) == ("", False)
        choice = chat(served, thinking_token_budget=5)
        assert choice["token_ids"][:5] == free["token_ids"][:5]
        assert choice["token_ids"][5] == marks[1]
        assert free["message"]["reasoning"].startswith(choice["message"]["reasoning"])
        assert choice["message"]["content"]
        at_once = chat(served, thinking_token_budget=0)
        assert at_once["token_ids"][0] == marks[1]
        assert at_once["message"]["reasoning"] is None

    def test_a_chat_that_does_not_reason_is_left_alone(self, served: ServerProcess) -> None:
        plain: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        assert chat(served, thinking_token_budget=5, **plain) == chat(served, **plain)

    @pytest.mark.parametrize("as_ids", [False, True])
    def test_a_completion_whose_prompt_opens_reasoning(
        self, served: ServerProcess, marks: tuple[int, int], as_ids: bool
    ) -> None:
        prompt: Any = "Why? <think>\n"
        if as_ids:
            prompt = httpx.post(served.base_url + "/tokenize", json={"prompt": prompt}).json()["tokens"]
        free = ask(served, "/v1/completions", prompt=prompt, max_tokens=12)
        choice = ask(served, "/v1/completions", prompt=prompt, max_tokens=12, thinking_token_budget=4)
        assert choice["token_ids"][:4] == free["token_ids"][:4]
        assert choice["token_ids"][4] == marks[1]
        assert len(choice["token_ids"]) == 12

    def test_a_completion_that_opens_it_itself(self, served: ServerProcess, marks: tuple[int, int]) -> None:
        first = {"logit_bias": {str(marks[0]): 100}}  # every token opens anew, until the end is the only one left
        choice = ask(served, "/v1/completions", prompt="Why?", max_tokens=6, thinking_token_budget=3, **first)
        assert choice["token_ids"] == [marks[0]] * 4 + [marks[1], marks[0]]

    def test_it_does_not_go_with_beams(self, served: ServerProcess) -> None:
        body = {"prompt": "a", "use_beam_search": True, "thinking_token_budget": 3}
        answer = httpx.post(served.base_url + "/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
