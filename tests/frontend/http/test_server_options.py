"""The effects of a server's options on its answers: reasoning parsers, and defaults of sampling."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from quire.core.errors import ConfigError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from tests.servers import ServerProcess

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking is not defined %}<think>\n{% endif %}"
)
GENERATION = {"temperature": 0.0, "top_k": 7, "repetition_penalty": 1.6, "max_new_tokens": 20}
OVERRIDES = {"repetition_penalty": 1.2, "frequency_penalty": 0.8, "max_new_tokens": 40}
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


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Why?"}]},
    "/v1/completions": {"prompt": "Why?"},
}


@pytest.fixture(scope="module")
def served(reasoner: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("options")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    process = ServerProcess(
        folder, str(reasoner), "--reasoning-parser", "qwen3", "--num-gpu-blocks-override", "128",
        "--generation-config", str(folder), "--override-generation-config", json.dumps(OVERRIDES),
        "--enable-force-include-usage", "--return-tokens-as-token-ids",
        "--fingerprint-mode", "custom", "--fingerprint-value", "mine",
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


class TestAnswers:
    @pytest.mark.parametrize("path", BODIES)
    def test_every_event_tells_usage_unasked(self, served: ServerProcess, path: str) -> None:
        """The event that tells a message's role comes before any token."""
        body = {**GREEDY, "stream": True, "max_tokens": 5, "ignore_eos": True, **BODIES[path]}
        lines = httpx.post(served.base_url + path, json=body, timeout=60).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert (counts[0] == 0, counts[-1]) == ("chat" in path, 5)
        assert counts == sorted(counts)
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        assert chunks[-1]["choices"] == []

    @pytest.mark.parametrize("path", BODIES)
    def test_tokens_are_spelled_as_ids_unless_asked_otherwise(self, served: ServerProcess, path: str) -> None:
        def tokens(**more: Any) -> list[str]:
            logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
            found = ask(served, path, **BODIES[path], **logprobs, max_tokens=4, ignore_eos=True, **more)["logprobs"]
            return [each["token"] for each in found["content"]] if "chat" in path else found["tokens"]

        assert all(token.startswith("token_id:") for token in tokens())
        assert not any(token.startswith("token_id:") for token in tokens(return_tokens_as_token_ids=False))

    def test_so_are_those_of_a_response(self, served: ServerProcess) -> None:
        body = {"input": "Why?", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "store": False}
        body["reasoning"] = {"effort": "none"}
        answer = httpx.post(served.base_url + "/v1/responses", json=body, timeout=60).json()
        [text] = [part for item in answer["output"] for part in item["content"] if part["type"] == "output_text"]
        assert text["logprobs"]
        assert all(each["token"].startswith("token_id:") for each in text["logprobs"])

    def test_the_fingerprint_is_the_owners(self, served: ServerProcess) -> None:
        for path, body in BODIES.items():
            answer = httpx.post(served.base_url + path, json={**GREEDY, **body, "max_tokens": 1}, timeout=60)
            assert answer.json()["system_fingerprint"] == "mine"


SCHEMA = {"type": "object", "properties": {"t": {"const": "a </think> b"}}, "required": ["t"]}
SCHEMA |= {"additionalProperties": False}
USER = [{"role": "user", "content": "Why?"}]
HELD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": USER,
        "thinking_token_budget": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": "Why?",
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": USER,
        "max_tokens": 60,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.mark.parametrize("path", HELD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mark_within_a_clients_format_is_text(served: ServerProcess, path: str, stream: bool) -> None:
    model = httpx.get(served.base_url + "/v1/models").json()["data"][0]["id"]
    body = {"model": model, "temperature": 0, "stream": stream, **HELD[path]}
    answer = httpx.post(served.base_url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(_text_of(json.loads(each)) for each in data)
    elif "chat" in path:
        text = answer.json()["choices"][0]["message"]["content"]
    else:
        *_, item = answer.json().get("output", [answer.json()])
        text = item["content"][-1]["text"]
    assert json.loads(text) == {"t": "a </think> b"}


def _text_of(event: dict[str, Any]) -> str:
    """What an event adds to the answer's text."""
    if event.get("choices"):
        return event["choices"][0]["delta"].get("content") or ""
    delta = event.get("delta", "")
    if event.get("type") == "response.output_text.delta":
        return str(delta)
    return str(delta.get("text", "")) if event.get("type") == "content_block_delta" else ""


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


class TestDefaultSampling:
    BODY: dict[str, Any] = {  # noqa: RUF012
        "prompt": "The quick brown", "ignore_eos": True, "max_tokens": 30, "allowed_token_ids": [*range(60, 70)],
    }  # fmt: skip

    def text(self, served: ServerProcess, **body: Any) -> str:
        answer = httpx.post(served.base_url + "/v1/completions", json={**self.BODY, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def test_a_request_that_names_nothing_gets_the_servers_defaults(self, served: ServerProcess) -> None:
        """The temperature comes from the folder, the penalties from the option that overrides it."""
        named = {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.8}
        plain = self.text(served)
        assert plain == self.text(served, **named)
        for change in ({"repetition_penalty": 1.6}, {"frequency_penalty": 0}, {"temperature": 3, "seed": 1}):
            assert self.text(served, **change) != plain, change

    @pytest.mark.parametrize(
        ("asked", "given"), [({"max_tokens": 100}, 40), ({"max_tokens": 5}, 5), ({"max_tokens": None}, 16)], ids=str
    )
    def test_no_text_is_longer_than_the_owner_allows(
        self, served: ServerProcess, asked: dict[str, Any], given: int
    ) -> None:
        assert len(ask(served, "/v1/completions", prompt="a", **asked)["token_ids"]) == given
        [rendered] = httpx.post(served.base_url + "/v1/completions/render", json={"prompt": "a", **asked}).json()
        assert rendered["sampling_params"]["max_tokens"] == (40 if asked["max_tokens"] is None else given)

    @pytest.mark.parametrize("asked", [{}, {"max_completion_tokens": 100}, {"max_tokens": 41}], ids=str)
    def test_nor_is_a_chat(self, served: ServerProcess, asked: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": "Why?"}]
        assert len(ask(served, "/v1/chat/completions", messages=messages, **asked)["token_ids"]) == 40

    @pytest.mark.parametrize(
        ("source", "temperature", "limit"), [("auto", 0.25, None), ("vllm", 1.0, None), ("FOLDER", 0.0, 20)]
    )
    def test_every_source(
        self, checkpoint: Callable[..., Path], tmp_path: Path, source: str, temperature: float, limit: int | None
    ) -> None:
        """A limit is only taken from a folder that the owner named; the checkpoint's own is a default."""
        folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "max_new_tokens": 9}))
        other = tmp_path / "other"
        other.mkdir()
        (other / "generation_config.json").write_text(json.dumps(GENERATION))
        llm = AsyncLLM.from_engine_args(
            model=str(folder), device="cpu", generation_config=str(other) if source == "FOLDER" else source
        )
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, llm.model.max_output_tokens) == (temperature, limit)
        assert defaults.max_tokens == {"auto": 9, "vllm": SamplingParams().max_tokens, "FOLDER": 20}[source]
        llm.shutdown()

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("generation_config", "/nowhere", r"/nowhere has no generation_config\.json"),
            ("override_generation_config", {"temp": 1}, "holds 'temp'; it may hold temperature, top_p"),
            ("override_generation_config", {"max_new_tokens": 0}, "--override-generation-config: max_tokens must be"),
            ("override_generation_config", {"top_p": 2}, "top_p must be"),
        ],
    )
    def test_what_is_wrong_is_told(self, checkpoint: Callable[..., Path], name: str, value: Any, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu", **{name: value})
