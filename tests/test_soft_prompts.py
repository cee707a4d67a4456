"""Soft prompts beside adapters and the base model: tokens and log-probabilities are those of PEFT."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from quire.core.errors import ConfigError, ParameterError
from tests.adapters import load
from tests.executor.test_peft_adapters import trained
from tests.frontend.http.test_app import Caller

peft = pytest.importorskip("peft")

NUM_ROWS, NUM_TOKENS = 19, 8
PROMPTS = [[(7 * i + 3 * length) % 300 + 3 for i in range(length)] for length in (1, 21, 40)]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {
    "max_model_len": 128, "num_gpu_blocks_override": 256, "enable_prompt_adapter": True, "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", tie=True)


def soft_prompt(model: Path, folder: Path, seed: int, config: Any = None) -> Any:
    """A model of PEFT's with random rows before each prompt, saved in `folder`."""
    torch.manual_seed(seed)
    config = config or peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=NUM_ROWS)
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    made.save_pretrained(folder)
    return made.eval()


def continued(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The likeliest tokens after a prompt, and their log-probabilities."""
    token_ids, logprobs = list(prompt), []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            row = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        token_ids.append(int(row.argmax()))
        logprobs.append(row.max())
    return token_ids[len(prompt) :], torch.stack(logprobs)


def test_rows_of_soft_prompts_adapters_and_the_base_share_steps(model: Path, tmp_path: Path) -> None:
    models = [
        soft_prompt(model, tmp_path / "0", 1), soft_prompt(model, tmp_path / "1", 2),
        soft_prompt(model, tmp_path / "2", 3, peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16)),
        trained(model, tmp_path / "3", target_modules="all-linear"), load(model),
    ]  # fmt: skip
    choices = [*(LoRARequest(str(i), i + 1, str(tmp_path / str(i))) for i in range(4)), None] * len(PROMPTS)
    prompts: list[Any] = [{"prompt_token_ids": PROMPTS[i // 5]} for i in range(len(choices))]
    wanted = [continued(models[i % 5], PROMPTS[i // 5]) for i in range(len(choices))]
    assert len({tuple(tokens) for tokens, _ in wanted[-5:]}) == 5, "they must differ to prove anything"

    def check(outputs: list[RequestOutput], *, is_cached: bool) -> None:
        for i, (output, (tokens, logprobs)) in enumerate(zip(outputs, wanted, strict=True)):
            completion = output.outputs[0]
            assert completion.token_ids == tokens, i
            assert completion.logprobs is not None
            got = torch.tensor([row[token].logprob for row, token in zip(completion.logprobs, tokens, strict=True)])
            torch.testing.assert_close(got, logprobs, atol=1e-4, rtol=0)
            assert output.prompt_token_ids == PROMPTS[i // 5]
            assert (output.num_cached_tokens or 0) <= len(PROMPTS[i // 5])
            if is_cached and i // 5 == 2:
                assert output.num_cached_tokens

    with LLM(str(model), **OPTIONS, block_size=16, enable_lora=True) as llm:
        for is_cached in (False, True):
            check(llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=choices), is_cached=is_cached)
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        with pytest.raises(ParameterError, match="not served behind a soft prompt"):
            llm.generate(prompts[0], scored, lora_request=choices[0])
        with pytest.raises(ParameterError, match="The prompt has 139 tokens"):
            llm.generate({"prompt_token_ids": [5] * 120}, PARAMS, lora_request=choices[0])
        beams = BeamSearchParams(beam_width=2, max_tokens=10)
        with pytest.raises(ParameterError, match="The prompt has 119 tokens and max_tokens asks for 10"):
            llm.beam_search([{"prompt_token_ids": [5] * 100}], beams, choices[0])
        cut = {"truncate_prompt_tokens": -1}
        [output] = llm.generate(
            {"prompt_token_ids": [5] * 200}, PARAMS, lora_request=choices[0], tokenization_kwargs=cut
        )  # fmt: skip
        assert len(output.prompt_token_ids or []) == 128 - NUM_ROWS - NUM_TOKENS
        with pytest.raises(ParameterError, match="lower it to at most 108"):
            llm.generate(
                {"prompt_token_ids": [5] * 200}, SamplingParams(max_tokens=109), lora_request=choices[0],
                tokenization_kwargs=cut,
            )  # fmt: skip


def test_soft_prompts_are_models_and_others_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    made = soft_prompt(model, tmp_path / "soft", 1)
    tokens, _ = continued(made, PROMPTS[1])
    trained(model, tmp_path / "lora", target_modules=["q_proj"])
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=NUM_ROWS)
    soft_prompt(model, tmp_path / "prefix", 2, prefix)
    file = load_file(tmp_path / "soft/adapter_model.safetensors")
    for name, rows in (("wide", torch.ones(3, 9)), ("long", torch.ones(NUM_ROWS + 1, 64))):
        shutil.copytree(tmp_path / "soft", tmp_path / name)
        save_file(dict.fromkeys(file, rows), tmp_path / name / "adapter_model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        engine = AsyncLLM.from_engine_args(
            model=str(model),
            **OPTIONS,
            prompt_adapters=[f"mine={tmp_path / 'soft'}"],
            max_prompt_adapter_token=NUM_ROWS,
        )
        call = Caller(engine)
        try:
            body = {
                "model": "mine",
                "prompt": PROMPTS[1],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = call("POST", "/v1/completions", json=body | {"return_token_ids": True}).json()
            assert answer["choices"][0]["token_ids"] == tokens
            assert answer["usage"]["prompt_tokens"] == len(PROMPTS[1])
            assert "mine" in [each["id"] for each in call("GET", "/v1/models").json()["data"]]
            for name, why in (
                ("lora", "changes the model's layers; start the server with --enable-lora"),
                ("prefix", "of the type 'PREFIX_TUNING', which is not served"),
                ("wide", "has the shape [3, 9]; this model takes [number of tokens, 64]"),
                ("long", f"at most {NUM_ROWS}"),
            ):
                load_it = {"lora_name": name, "lora_path": str(tmp_path / name)}
                refused = call("POST", "/v1/load_lora_adapter", json=load_it)
                assert refused.status_code == 400, name
                assert why in refused.json()["error"]["message"]
        finally:
            call._runner.run(engine.aclose())
            call.close()


def test_a_soft_prompt_needs_the_flag(model: Path, tmp_path: Path) -> None:
    soft_prompt(model, tmp_path, 1)
    options = {**OPTIONS, "enable_prompt_adapter": False, "enable_lora": True, "lora_modules": [f"soft={tmp_path}"]}
    with pytest.raises(ConfigError, match="start the server with --enable-prompt-adapter"), LLM(str(model), **options):
        pass
