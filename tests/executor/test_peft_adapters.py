"""Adapters that PEFT has saved, against PEFT's own log-probabilities, as they are and merged into the model."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.core.config.lora import AdapterOptions
from quire.core.wire.adapters import Adapter, AdapterLoad, LoadedAdapter, adapter_digest
from quire.core.wire.protocol import StepPlan, StepResult
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.row_outputs import PromptLogprobs
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.worker import Worker
from quire.frontend.checkpoint.adapters import find_adapter
from tests.executor.step.test_model_runner import engine_config, generate, prompt_of, request
from tests.executor.thread_group import on_every_rank
from tests.storage import hung_file

peft = pytest.importorskip("peft")

OPTIONS = AdapterOptions(max_adapters=2, max_rank=16, max_on_host=2)
TOKENS = prompt_of(3, 24)[::7]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "names": ("qwen3", {"target_modules": ["q_proj", "v_proj"]}),
    "all-linear": ("qwen3", {"target_modules": "all-linear"}),
    "pattern": ("qwen3", {"target_modules": r".*\.layers\.\d\.(self_attn\.[qk]_proj|mlp\.down_proj)"}),
    "excluded": ("qwen3", {"target_modules": "all-linear", "exclude_modules": ["o_proj", "up_proj"]}),
    "layers": ("llama", {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "rslora": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "rank patterns": (
        "qwen3",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"v_proj": 5, "down_proj": 17},
        },
    ),
    "rslora with patterns": (
        "qwen3",
        {
            "target_modules": ATTENTION,
            "use_rslora": True,
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {"k_proj": 3},
        },
    ),
    "dora": ("qwen3", {"target_modules": "all-linear", "use_dora": True}),
    "dora with biases": ("qwen2", {"target_modules": "all-linear", "use_dora": True}),
    "biases": ("qwen2", {"target_modules": ATTENTION, "bias": "lora_only"}),
    "all biases": ("qwen2", {"target_modules": ["v_proj", "gate_proj"], "bias": "all"}),
    "bias of B": ("qwen2", {"target_modules": ["q_proj", "k_proj", "v_proj"], "lora_bias": True}),
    "head": ("qwen3", {"target_modules": ["lm_head", "q_proj"]}),
    "head that shares the embedding's weight": ("qwen3 tied", {"target_modules": ["lm_head", "q_proj"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "embedding": ("qwen3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding of a tied head": ("qwen3 tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding": ("gemma3", {"target_modules": ["embed_tokens"]}),
    "embedding tied by PEFT": (
        "qwen3 tied",
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    ),
    "tokens": ("qwen3", {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS}),
    "tokens of a tied head": (
        "qwen3",
        {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": TOKENS}},
    ),
    "tokens alone": ("qwen3 tied", {"peft_type": "TRAINABLE_TOKENS", "token_indices": TOKENS}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "factors": (
        "qwen2",
        {"peft_type": "IA3", "target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "factors of fused layers": (
        "phi3",
        {"peft_type": "IA3", "target_modules": ["qkv_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "factors of transposed layers": (
        "gpt2",
        {
            "peft_type": "IA3",
            "target_modules": ["c_attn", "mlp.c_proj"],
            "feedforward_modules": ["mlp.c_proj"],
            "fan_in_fan_out": True,
        },
    ),
    "transposed dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
}


MERGED_OTHERWISE = {
    "head that shares the embedding's weight", "embedding of a tied head", "embedding tied by PEFT",
}  # fmt: skip
"""Merging changes the one weight that embedding and head share, in both places, as PEFT warns."""


@pytest.fixture(scope="module")
def folder_of(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    def get(family: str) -> Path:
        name, _, kind = family.partition(" ")
        return checkpoint(name, tie=True) if kind else checkpoint(name)

    return get


def trained(model_folder: Path, folder: Path, seed: int = 0, **config: Any) -> Any:
    """A model of PEFT's with random adapters, which are saved in `folder`."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    kind = {"IA3": peft.IA3Config, "TRAINABLE_TOKENS": peft.TrainableTokensConfig}.get(config.pop("peft_type", "LORA"))
    if kind is None:
        kind, config = peft.LoraConfig, {"r": 4, "lora_alpha": 6} | config
    model = peft.get_peft_model(base, kind(task_type="CAUSAL_LM", **config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("magnitude" in name or "ia3" in name):
                parameter.mul_(1 + torch.rand_like(parameter) / 2)
            elif parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / max(parameter.shape[-1], 4) ** 0.5)
    model.save_pretrained(folder)
    return model.eval()


def logprobs_of(model: Any, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)


class Scorer:
    """A worker whose requests all have the adapter in slot 1."""

    def __init__(self, worker: Worker, start: int = 0) -> None:
        self._worker = worker
        self._start = start
        self.adapter = 1

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for new in plan.admitted:
            new.adapter, new.adapter_start = self.adapter, self._start
        return self._worker.launch(plan)

    def collect(self, step: LaunchedStep) -> StepResult:
        return self._worker.collect(step)

    def score(self, prompt: list[int], **limits: Any) -> Tensor:
        worker: Any = self
        asked = [request("a", prompt, max_tokens=1, prompt_logprobs=0)]
        deltas = generate(worker, asked, enable_prefix_caching=False, **limits)
        parts = [delta.output for delta in deltas["a"] if isinstance(delta.output, PromptLogprobs)]
        return torch.tensor([entry.logprobs[0] for part in parts for entry in part.positions])


def start(model_folder: Path, group: ParallelGroup | None = None, **changes: Any) -> Worker:
    group = group or ParallelGroup()
    config = engine_config(model_folder, **{"adapters": OPTIONS, **changes})
    worker = Worker(config, Rank(tensor=group.rank), group)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return worker


def load(worker: Worker, folder: Path, slot: int = 1) -> LoadedAdapter:
    """Loads an adapter as a call of the engine does, and waits."""
    loader = worker._adapter_loader
    assert loader is not None
    return loader._load(AdapterLoad(Adapter("name", str(folder), adapter_digest(folder)), slot))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_have_the_log_probabilities_of_peft(
    folder_of: Callable[[str], Path], variant: str, tmp_path: Path
) -> None:
    family, config = VARIANTS[variant]
    model_folder, prompt = folder_of(family), prompt_of(3, 24)
    model = trained(model_folder, tmp_path, **config)
    worker = start(model_folder)
    assert load(worker, tmp_path) == LoadedAdapter()
    scorer = Scorer(worker)
    got, wanted = scorer.score(prompt), logprobs_of(model, prompt)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    scorer.adapter = -1
    base = scorer.score(prompt)
    assert (base - wanted).abs().max() > 1e-2, "the adapter must change something to prove anything"
    if variant not in MERGED_OTHERWISE:
        merged = logprobs_of(model.merge_and_unload(), prompt)
        torch.testing.assert_close(got, merged, atol=1e-4, rtol=0)
    with torch.inference_mode():
        plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    torch.testing.assert_close(base, logprobs_of(plain, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "variant", ["all-linear", "dora with biases", "all biases", "head", "factors", "embedding", "tokens of a tied head"]
)
def test_two_ranks_have_the_log_probabilities_of_peft(
    folder_of: Callable[[str], Path], variant: str, tmp_path: Path
) -> None:
    family, config = VARIANTS[variant]
    model_folder, prompt = folder_of(family), prompt_of(3, 24)
    wanted = logprobs_of(trained(model_folder, tmp_path, **config), prompt)

    def job(group: ParallelGroup) -> Tensor:
        worker = start(model_folder, group, layout=Layout(tensor=2))
        assert load(worker, tmp_path) == LoadedAdapter()
        return Scorer(worker).score(prompt)

    for got in on_every_rank(2, job):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


NAMES: dict[str, tuple[str, str]] = {
    "PEFT, Unsloth, LLaMA-Factory, Megatron-Bridge": ("", ""),
    "a state dict of PEFT's": (r"\.lora_(.)\.weight", r".lora_\1.default.weight"),
    "Axolotl, compiled": (r"^base_model\.model\.", "base_model.model._orig_mod."),
    "FSDP": (r"layers\.(\d+)\.", r"_fsdp_wrapped_module.layers.\1._fsdp_wrapped_module."),
    "activation checkpointing": (r"layers\.(\d+)\.", r"layers.\1._checkpoint_wrapped_module."),
    "DeepSpeed": ("^", "module."),
    "NeMo AutoModel": (r"^base_model\.model\.", ""),
    "torchtune": (r"^base_model\.model\.model\.", ""),
    "a language model within another": (r"^base_model\.model\.model\.", "base_model.model.model.language_model."),
    "the same, of older libraries": (r"^base_model\.model\.model\.", "base_model.model.language_model.model."),
}
"""What trainers write in place of parts of PEFT's names."""


def test_names_of_all_trainers_mean_the_same_layers(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    model_folder, prompt = folder_of("qwen3"), prompt_of(3, 24)
    config = {
        "target_modules": "all-linear",
        "rank_pattern": {"layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"q_proj": 3},
    }
    wanted, path = (
        logprobs_of(trained(model_folder, tmp_path, **config), prompt),
        tmp_path / "adapter_model.safetensors",
    )
    worker, tensors = start(model_folder), load_file(tmp_path / "adapter_model.safetensors")
    for form, (pattern, instead) in NAMES.items():
        save_file({re.sub(pattern, instead, name): tensor for name, tensor in tensors.items()}, path)
        assert load(worker, tmp_path) == LoadedAdapter(), form
        torch.testing.assert_close(Scorer(worker).score(prompt), wanted, atol=1e-4, rtol=0)
    tower = {
        f"base_model.model.vision_tower.layers.0.mlp.up_proj.lora_{kind}.weight": torch.ones(2, 2) for kind in "AB"
    }
    save_file(tensors | tower, path)
    assert "vision_tower.layers.0.mlp.up_proj, a layer for images or sounds" in (load(worker, tmp_path).error or "")
    of_megatron = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight"
    save_file({of_megatron: torch.ones(2, 2)}, path)
    assert load(worker, tmp_path).left_over == [of_megatron]


@pytest.mark.parametrize("chunk", [512, 5])
def test_an_activated_adapter_begins_at_its_invocation(
    folder_of: Callable[[str], Path], chunk: int, tmp_path: Path
) -> None:
    """It begins at the last place of the tokens in the prompt; a prompt without them is the base model's."""
    model_folder, prompt = folder_of("qwen3"), prompt_of(3, 24)
    invocation = [7, 11, 9]
    prompt[4:7] = prompt[13:16] = invocation
    config = {"target_modules": "all-linear", "alora_invocation_tokens": invocation}
    model = trained(model_folder, tmp_path, **config)
    adapter = find_adapter("name", str(tmp_path))
    start_token = adapter.start_in(prompt)
    assert start_token == 13
    assert adapter.start_in(prompt[:6]) is None
    worker = start(model_folder)
    assert load(worker, tmp_path) == LoadedAdapter()
    got = Scorer(worker, start_token).score(prompt, max_num_batched_tokens=chunk)
    torch.testing.assert_close(got, logprobs_of(model, prompt), atol=1e-4, rtol=0)
    everywhere = Scorer(worker).score(prompt)
    assert (everywhere - got).abs().max() > 1e-2, "the place must change something to prove anything"


@pytest.mark.parametrize("family", ["qwen3", "qwen3 tied"])
def test_new_rows_of_saved_weights_take_a_rank_each(
    folder_of: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    """A few changed rows of a whole embedding or head are served; more than ranks, or other shapes, are refused."""
    model_folder, prompt = folder_of(family), prompt_of(3, 24)
    saved = ["embed_tokens", "lm_head"]
    model = trained(model_folder, tmp_path, target_modules=["q_proj"], modules_to_save=saved)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    own = {"embed_tokens": base.get_input_embeddings().weight, "lm_head": base.get_output_embeddings().weight}
    changed = {"embed_tokens": [prompt[0], prompt[5]], "lm_head": [prompt[1], prompt[7], prompt[9]]}
    with torch.no_grad():
        for name, module in model.named_modules():
            kind = name.rpartition(".")[2]
            if kind in own and hasattr(module, "modules_to_save"):
                module.weight.copy_(rows_but(own[kind], module.weight, changed[kind]))
        for key, tensor in tensors.items():
            kind = next((kind for kind in saved if f"{kind}.weight" in key), None)
            tensors[key] = tensor if kind is None else rows_but(own[kind], tensor, changed[kind]).contiguous()
    save_file(tensors, path)
    worker = start(model_folder)
    assert load(worker, tmp_path) == LoadedAdapter()
    torch.testing.assert_close(Scorer(worker).score(prompt), logprobs_of(model, prompt), atol=1e-4, rtol=0)
    [key] = [key for key in tensors if "embed_tokens.weight" in key]
    for weight, why in (
        (torch.randn_like(tensors[key]), "replaces .* rows of .*embed_tokens.*--max-lora-rank is 16"),
        (torch.cat([tensors[key], torch.ones(1, tensors[key].shape[1])]), "another number of tokens"),
    ):
        save_file(tensors | {key: weight}, path)
        error = load(worker, tmp_path).error or ""
        assert key in error
        assert re.search(why, error), error


def rows_but(own: Tensor, new: Tensor, changed: list[int]) -> Tensor:
    """`own` with the `changed` rows of `new`."""
    rows = own.detach().clone()
    rows[changed] = new[changed].detach()
    return rows


def test_a_slot_holds_what_was_loaded_last(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """After an adapter of other layers, with factors, and of a higher rank, nothing of it is left."""
    model_folder, prompt = folder_of("qwen2"), prompt_of(5, 20)
    worker = start(model_folder)
    kinds = [{"target_modules": "all-linear", "use_dora": True, "r": 16}, {"target_modules": ["v_proj"]}]
    for number, config in enumerate(kinds):
        folder = tmp_path / str(number)
        wanted = logprobs_of(trained(model_folder, folder, number, **config), prompt)
        assert load(worker, folder) == LoadedAdapter()
        torch.testing.assert_close(Scorer(worker).score(prompt), wanted, atol=1e-4, rtol=0)


def test_room_for_factors_changes_nothing(folder_of: Callable[[str], Path]) -> None:
    """The first adapter with factors makes it, while steps with others may be running."""
    place = start(folder_of("qwen3")).adapters
    assert place is not None
    layer = place.layers[0]
    layer._add_factors()
    assert layer._weights.factors is not None
    assert layer._weights.shifts is not None
    assert layer._weights.factors.eq(1).all()
    assert not layer._weights.shifts.any()


def test_files_that_do_not_come_are_given_up_and_write_to_no_slot_later(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LORA_LOAD_TIMEOUT_S", "1")
    family, config = VARIANTS["names"]
    folders = [tmp_path / name for name in ("slow", "fast")]
    for seed, folder in enumerate(folders):
        trained(folder_of(family), folder, seed, **config)
    slow, fast = (Adapter(each.name, str(each), adapter_digest(each)) for each in folders)
    worker, prompt = start(folder_of(family)), prompt_of(3, 24)
    loader = worker._adapter_loader
    assert loader is not None
    with hung_file(folders[0] / "adapter_model.safetensors"):
        late = loader._load(AdapterLoad(slow, 1))
        assert late.is_late
        assert "were not read in 1 s" in (late.error or "")
        assert loader._load(AdapterLoad(fast, 1)) == LoadedAdapter()
        before = Scorer(worker).score(prompt)
    until = time.monotonic() + 60
    while loader._load(AdapterLoad(slow, 0)) != LoadedAdapter():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert torch.equal(Scorer(worker).score(prompt), before)
