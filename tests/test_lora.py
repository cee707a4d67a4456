"""Requests with adapters, from the Python API and over HTTP: their tokens are those of the merged models."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from quire import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from quire.core.errors import ConfigError, NotFoundError, ParameterError
from tests.adapters import greedy, load, merged, random_tensors, save_adapter
from tests.checkpoints import VOCAB_SIZE
from tests.executor.test_peft_adapters import trained
from tests.frontend.http.test_app import Caller
from tests.tiny_whisper import write_whisper

pytestmark = pytest.mark.turns(4, among="whole systems")

NUM_ADAPTERS, NUM_TOKENS = 5, 12
OPTIONS: dict[str, Any] = {
    "max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 512, "enable_lora": True, "max_loras": 2,
    "max_cpu_loras": 3, "max_lora_rank": 4,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompt_of(number: int) -> list[int]:
    """The same 40 tokens at the beginning, so that prefixes could be mixed up."""
    shared = [(7 * i + 3) % (VOCAB_SIZE - 3) + 3 for i in range(40)]
    return shared + [(number * 31 + 17 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(1 + 5 * number % 23)]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base, root = load(model), tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / f"a{number}", random_tensors(base, number)) for number in range(NUM_ADAPTERS)]


@pytest.fixture(scope="module")
def requests(folders: list[Path]) -> list[LoRARequest | None]:
    """The adapters of 18 prompts; every sixth has none."""
    known: list[LoRARequest | None] = [LoRARequest(f"a{i}", i + 1, str(each)) for i, each in enumerate(folders)]
    return [*known, None] * 3


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    base = load(model)
    models = [merged(model, random_tensors(base, number)) for number in range(NUM_ADAPTERS)] + [base]
    return [greedy(models[i % 6], prompt_of(i // 6), NUM_TOKENS) for i in range(18)]


def tokens_of(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    prompts: list[Any] = [{"prompt_token_ids": prompt_of(i // 6)} for i in range(18)]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    assert [output.lora_request for output in outputs] == requests
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="more-adapters-than-slots-and-memory"),
        pytest.param({"max_loras": 5, "max_cpu_loras": 5, "max_num_batched_tokens": 16}, id="all-in-chunks-of-16"),
        pytest.param({"num_gpu_blocks_override": 14, "max_loras": 3}, id="preempted"),
        pytest.param({"tensor_parallel_size": 2}, id="tensor-parallel-2"),
        pytest.param({"pipeline_parallel_size": 2}, id="two-stages"),
    ],
)
def test_tokens_are_those_of_the_merged_models(
    model: Path, requests: list[LoRARequest | None], expected: list[list[int]], options: dict[str, Any]
) -> None:
    with LLM(str(model), **(OPTIONS | options)) as llm:
        for _ in range(2):  # the second time with cached prefixes
            assert tokens_of(llm, requests) == expected
        for number in (0, 4, 5):
            [output] = llm.generate(
                {"prompt_token_ids": prompt_of(0)}, PARAMS, use_tqdm=False, lora_request=requests[number]
            )
            assert output.outputs[0].token_ids == expected[number], "alone"
    assert len({tuple(tokens) for tokens in expected[:6]}) == 6, "the adapters must differ to prove anything"


def test_streams_go_on_after_a_crash(model: Path, folders: list[Path], expected: list[list[int]]) -> None:
    async def run() -> list[list[int]]:
        engine = AsyncLLM.from_engine_args(model=str(model), **OPTIONS)
        try:
            await engine.start()

            async def stream(number: int) -> list[int]:
                adapter = LoRARequest(f"a{number}", number + 1, str(folders[number])) if number < 5 else None
                prompt: Any = {"prompt_token_ids": prompt_of(0)}
                async for output in engine.generate(prompt, PARAMS, str(number), lora_request=adapter):
                    if number == 0 and not killed and len(output.outputs[0].token_ids) > 2:
                        killed.append(True)
                        os.kill(engine.client.engine_pids[0] or 0, signal.SIGKILL)
                return output.outputs[0].token_ids

            killed: list[bool] = []
            return await asyncio.gather(*map(stream, range(6)))
        finally:
            await engine.aclose()

    assert asyncio.run(run()) == expected[:6]


def test_vectors_and_beams_have_adapters(model: Path, folders: list[Path]) -> None:
    from quire import BeamSearchParams

    adapter = LoRARequest("a0", 1, str(folders[0]))
    prompt: Any = {"prompt_token_ids": prompt_of(0)}
    base = load(model)
    changed = merged(model, random_tensors(base, 0))
    with LLM(str(model), **OPTIONS, runner="pooling", convert="embed") as llm:
        plain, adapted = llm.embed([prompt, prompt], use_tqdm=False, lora_request=[None, adapter])
        for output, reference in ((plain, base), (adapted, changed)):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([prompt_of(0)])).last_hidden_state[0, -1]
            vector = torch.nn.functional.normalize(hidden, dim=0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector, atol=1e-4, rtol=1e-4)
    with LLM(str(model), **OPTIONS) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
        [plain_beams], [beams] = (llm.beam_search([prompt], params, each) for each in (None, adapter))
        assert [beam.tokens for beam in beams.sequences] != [beam.tokens for beam in plain_beams.sequences]
        with pytest.raises(ParameterError, match="lora_request has 1 entries for 2 prompts"):
            llm.generate([prompt, prompt], PARAMS, lora_request=[adapter])


def test_an_activated_adapter_finds_the_base_models_pages(model: Path, tmp_path: Path) -> None:
    """Those before its invocation; those after it are its own."""
    pytest.importorskip("peft")
    invocation = [7, 11, 9]
    changed = trained(model, tmp_path, target_modules="all-linear", alora_invocation_tokens=invocation)
    adapter, shared = LoRARequest("activated", 1, str(tmp_path)), prompt_of(0)[:40]
    prompts = [[*shared, *invocation, *tail] for tail in ([21, 22, 23], [*range(30, 50)])]
    wanted = []
    for prompt in prompts:
        token_ids = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                token_ids.append(int(changed(torch.tensor([token_ids])).logits[0, -1].argmax()))
        wanted.append(token_ids[len(prompt) :])
    base, size = load(model), 16
    with LLM(str(model), **OPTIONS, block_size=size) as llm:

        def ask(prompt: list[int], adapter: LoRARequest | None) -> RequestOutput:
            [output] = llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False, lora_request=adapter)
            return output

        assert ask(shared, None).outputs[0].token_ids == greedy(base, shared, NUM_TOKENS)
        for prompt, tokens in zip(prompts, wanted, strict=True):
            first, again = ask(prompt, adapter), ask(prompt, adapter)
            assert first.outputs[0].token_ids == again.outputs[0].token_ids == tokens
            assert first.num_cached_tokens == 40 // size * size
            assert again.num_cached_tokens == (len(prompt) - 1) // size * size
            assert ask(prompt, None).outputs[0].token_ids == greedy(base, prompt, NUM_TOKENS)
        assert ask(shared, adapter).outputs[0].token_ids == greedy(base, shared, NUM_TOKENS), "nothing invokes it"


def test_stages_have_new_rows_of_an_embedding_and_of_the_head_that_shares_it(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    model, prompt = checkpoint("qwen3", tie=True), prompt_of(0)
    base = load(model)
    tokens = [*prompt[:2], *greedy(base, prompt, 2)]  # of the prompt, and some that are likely
    changed = trained(
        model, tmp_path, target_modules=["q_proj"], r=4, trainable_token_indices=list(dict.fromkeys(tokens))
    )
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            token_ids.append(int(changed(torch.tensor([token_ids])).logits[0, -1].argmax()))
    with LLM(str(model), **(OPTIONS | {"max_lora_rank": 8}), pipeline_parallel_size=2) as llm:
        choices = [None, LoRARequest("tokens", 1, str(tmp_path))]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 2, PARAMS, use_tqdm=False, lora_request=choices)
    assert [each.outputs[0].token_ids for each in outputs] == [
        greedy(base, prompt, NUM_TOKENS), token_ids[len(prompt) :],
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- HTTP


@pytest.fixture(scope="module")
def call(model: Path, folders: list[Path]) -> Iterator[Caller]:
    """A server with two adapters, that may load more, also from a folder where a request looks for them."""
    with pytest.MonkeyPatch.context() as patch:
        root = folders[0].parent / "found"
        config = json.loads((folders[4] / "adapter_config.json").read_text())
        for name, base in (("mine", str(model)), ("others", "another/model")):
            shutil.copytree(folders[4], root / name)
            (root / name / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("QUIRE_LORA_RESOLVER_CACHE_DIR", str(root))
        engine = AsyncLLM.from_engine_args(
            model=str(model), served_model_name=["tiny"], **OPTIONS,
            lora_modules=[f"a0={folders[0]}", json.dumps({"name": "a1", "path": str(folders[1])})],
        )  # fmt: skip
        caller = Caller(engine)
        caller.engine = engine  # type: ignore[attr-defined]
        yield caller
        caller._runner.run(engine.aclose())
        caller.close()


def complete(call: Caller, model: str | None, number: int = 0, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt_of(number), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return call("POST", "/v1/completions", json=body | {"return_token_ids": True} | fields)


def test_the_name_of_an_adapter_is_a_models_name(call: Caller, expected: list[list[int]], folders: list[Path]) -> None:
    for name, number in (("a0", 0), ("a1", 1), ("tiny", 5), (None, 5), ("a0", 0)):
        answer = complete(call, name).json()
        assert answer["choices"][0]["token_ids"] == expected[number], name
        assert answer["model"] == (name or "tiny")
    models = call("GET", "/v1/models").json()["data"]
    found = {each["id"]: (each["root"], each["parent"]) for each in models}
    assert found["tiny"][1] is None
    assert (found["a0"], found["a1"]) == ((str(folders[0]), "tiny"), (str(folders[1]), "tiny"))
    assert call("GET", "/v1/models/a0").json()["parent"] == "tiny"
    anthropic = call("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [each["id"] for each in anthropic["data"]][:3] == ["tiny", "a0", "a1"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_protocol_takes_adapters(call: Caller, path: str) -> None:
    texts = []
    for name in ("tiny", "a0"):
        message = [{"role": "user", "content": "Hello there"}]
        limits = {"/v1/responses": {"max_output_tokens": 8, "input": message}}
        body = {"model": name, "temperature": 0, **limits.get(path, {"max_tokens": 8, "messages": message})}
        answer = call("POST", path, json=body).json()
        assert answer["model"] == name
        texts.append(json.dumps([answer.get("choices"), answer.get("content"), answer.get("output")]))
    assert texts[0] != texts[1]


def test_unknown_names_are_told_with_those_that_are_known(call: Caller) -> None:
    for name in ("a9", "others", "../found/mine", "mine/../others", "x" * 5000, "\0"):
        answer = complete(call, name)
        assert answer.status_code == 404
        assert "'tiny' or 'a0' or 'a1'" in answer.json()["error"]["message"]


def test_a_folder_has_adapters_that_requests_name(call: Caller, expected: list[list[int]]) -> None:
    assert complete(call, "mine").json()["choices"][0]["token_ids"] == expected[4]
    assert "mine" in [each["id"] for each in call("GET", "/v1/models").json()["data"]]


def test_adapters_come_and_go(call: Caller, folders: list[Path], expected: list[list[int]], tmp_path: Path) -> None:
    def load_adapter(name: str, path: Path, **fields: Any) -> httpx.Response:
        return call("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})

    answer = load_adapter("new", folders[2])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert complete(call, "new").json()["choices"][0]["token_ids"] == expected[2]
    assert load_adapter("new", folders[3]).status_code == 400
    assert load_adapter("new", folders[3], load_inplace=True).status_code == 200
    assert complete(call, "new").json()["choices"][0]["token_ids"] == expected[3]
    assert load_adapter("tiny", folders[3]).status_code == 400
    assert load_adapter("none", tmp_path / "none").status_code == 404
    assert load_adapter("", folders[3]).status_code == 400
    answer = call("POST", "/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert complete(call, "new").status_code == 404
    assert call("POST", "/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 404


def test_what_does_not_fit_is_refused_with_the_tensors_name(call: Caller, model: Path, tmp_path: Path) -> None:
    tensors = random_tensors(load(model), 0, ("q_proj",))
    name = "model.layers.0.self_attn.q_proj"
    faults: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (tensors | {f"{name}.lora_A.weight": torch.zeros(4, 5)}, {}, rf"{name} are \[4, 5\]"),
        (tensors | {"model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
                    "model.layers.9.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4)}, {}, "layers.9.*belong to no"),
        ({key: value for key, value in tensors.items() if "lora_B" not in key}, {}, "lora_A.*not the other"),
        (tensors | {"model.norm.weight": torch.ones(64) * 3}, {}, "model.norm.weight belong to no layer"),
        (tensors | {"model.what": torch.ones(3)}, {}, "model.what is none that"),
        (random_tensors(load(model), 0, rank=6), {"r": 6}, "ranks are at most 4"),
        (tensors, {"peft_type": "LOHA"}, "type 'LOHA', which is not served"),
        (tensors, {"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        (tensors, {"r": "many"}, "adapter_config.json"),
    ]  # fmt: skip
    for number, (given, config, message) in enumerate(faults):
        folder = save_adapter(tmp_path / str(number), given, **config)
        body = {"lora_name": "wrong", "lora_path": str(folder)}
        answer = call("POST", "/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400, message
        assert __import__("re").search(message, answer.json()["error"]["message"]), answer.text
    (folder / "adapter_model.safetensors").write_bytes(b"no")
    answer = call("POST", "/v1/load_lora_adapter", json={"lora_name": "wrong", "lora_path": str(folder)})
    assert answer.status_code == 400


def test_metrics_name_the_adapters_in_use(call: Caller) -> None:
    complete(call, "a0")
    text = call("GET", "/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in line
    assert float(line.split()[-1]) > time.time() - 100


def test_a_program_loads_and_forgets_adapters(call: Caller, folders: list[Path]) -> None:
    engine: AsyncLLM = call.engine  # type: ignore[attr-defined]

    async def run() -> None:
        assert await engine.add_lora(LoRARequest("b", 7, str(folders[0])))
        assert 7 in await engine.list_loras()
        assert await engine.remove_lora(7)
        assert not await engine.remove_lora(7)
        with pytest.raises(NotFoundError):
            await engine.add_lora(LoRARequest("b", 8, "/none"))

    call._runner.run(run())


def test_wrong_options_are_refused(model: Path, folders: list[Path]) -> None:
    for options, message in (
        ({"max_loras": 4, "max_cpu_loras": 3}, "--max-cpu-loras 3 is less"),
        ({"lora_modules": ["a"]}, "NAME=PATH"),
        ({"lora_modules": ["a=b", "a=c"]}, "twice"),
        ({"lora_modules": ['{"name": "a"}']}, "object with name and path"),
    ):
        with pytest.raises(ConfigError, match=message):
            AsyncLLM.from_engine_args(model=str(model), **(OPTIONS | options))


def test_models_with_an_encoder_take_no_adapters(tmp_path: Path) -> None:
    write_whisper(tmp_path)
    with pytest.raises(ConfigError, match="merge the adapter"):
        AsyncLLM.from_engine_args(model=str(tmp_path), enable_lora=True)
