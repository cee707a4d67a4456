"""A checkpoint without a chat template, served with the format of its model's maker in all three protocols.

Its weights are a table of which token follows which, so the answer behind `<think>` or `</think>` is known.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.checkpoints import EOS_TOKEN, VOCAB_SIZE
from tests.frontend.text.test_message_formats import RECORDED
from tests.servers import ServerProcess

ANSWER = [
    "<think>",
    "They ask for the weather.",
    "</think>",
    "I look it up.",
    "\n\n<｜DSML｜function_calls>\n",
    '<｜DSML｜invoke name="weather">\n',
    '<｜DSML｜parameter name="city" string="true">',
    "Stock",
    "holm",
    "</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n",
    "</｜DSML｜function_calls>",
    EOS_TOKEN,
]
MARKS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"]
NUM_ROWS = VOCAB_SIZE + len(ANSWER) + len(MARKS)
QUESTION = RECORDED["conversations"]["one question"]
CHAT_TOOLS = RECORDED["tools"]
FUNCTIONS = [tool["function"] for tool in CHAT_TOOLS]
MESSAGES_TOOLS = [
    {"input_schema" if key == "parameters" else key: value for key, value in function.items()} for function in FUNCTIONS
]
RESPONSES_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    folder = checkpoint("deepseek_v32", vocab_size=NUM_ROWS)
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ANSWER[:-1]])
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name or name == "lm_head.weight":
            tensor.zero_()
    embeddings = weights["model.embed_tokens.weight"].sign_()
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    ids = [tokenizer.token_to_id(text) for text in ANSWER]
    for token_id, next_id in itertools.pairwise(ids):
        weights["lm_head.weight"][next_id] = embeddings[token_id]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = ServerProcess(
        tmp_path_factory.mktemp("formats"), str(folder), "--served-model-name", "tiny", "--enable-auto-tool-choice",
        "--reasoning-parser", "deepseek_v3", "--num-gpu-blocks-override", "512",
    )  # fmt: skip
    yield server.wait_until_ready().base_url
    server.stop()


@pytest.fixture(scope="module")
def prompt_ids(folder: Path) -> Callable[[bool, bool], list[int]]:
    """The ids of what the maker's encoder writes of the question, with tools and with reasoning."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(with_tools: bool, thinks: bool) -> list[int]:
        variables = {"thinking": True} if thinks else {}
        [text] = [
            prompt
            for name, title, *choices, prompt in RECORDED["prompts"]
            if (name, title, *choices) == ("deepseek_v32", "one question", with_tools, variables)
        ]
        return tokenizer.encode(text, add_special_tokens=False).ids

    return ids


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("thinks", [False, True])
def test_a_chat_is_written_and_read_in_the_makers_format(url: str, prompt_ids: Any, thinks: bool) -> None:
    variables = {"chat_template_kwargs": {"thinking": True}} if thinks else {}
    told = post(url, "chat/completions", messages=QUESTION, tools=CHAT_TOOLS, return_token_ids=True, **variables)
    assert told["prompt_token_ids"] == prompt_ids(True, thinks)
    [choice] = told["choices"]
    message = choice["message"]
    [call] = message["tool_calls"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I look it up.")
    assert message["reasoning"] == ("They ask for the weather." if thinks else None)
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Stockholm"}
    plain = post(url, "chat/completions", messages=QUESTION, max_tokens=1, return_token_ids=True, **variables)
    assert plain["prompt_token_ids"] == prompt_ids(False, thinks)


@pytest.mark.parametrize("thinks", [False, True])
def test_messages_are_written_and_read_in_the_makers_format(url: str, prompt_ids: Any, thinks: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    told = post(url, "messages", messages=QUESTION, tools=MESSAGES_TOOLS, thinking=thinking, max_tokens=2000)
    assert told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"] == len(prompt_ids(True, thinks))
    *others, text, call = told["content"]
    assert [block["thinking"] for block in others] == (["They ask for the weather."] if thinks else [])
    assert (told["stop_reason"], text["text"]) == ("tool_use", "I look it up.")
    assert (call["name"], call["input"]) == ("weather", {"city": "Stockholm"})


@pytest.mark.parametrize("thinks", [False, True])
def test_a_response_is_written_and_read_in_the_makers_format(url: str, prompt_ids: Any, thinks: bool) -> None:
    variables = {"chat_template_kwargs": {"thinking": thinks}}
    told = post(url, "responses", input=QUESTION[0]["content"], tools=RESPONSES_TOOLS, **variables)
    assert told["usage"]["input_tokens"] == len(prompt_ids(True, thinks))
    *others, message, call = told["output"]
    assert [item["content"][0]["text"] for item in others] == (["They ask for the weather."] if thinks else [])
    assert (told["status"], message["content"][0]["text"]) == ("completed", "I look it up.")
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Stockholm"})
