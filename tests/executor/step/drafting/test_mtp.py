"""Multi-token prediction: drafts equal those of whole sequences in Transformers' layers, and change no token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHConfig, Qwen3_5TextConfig, Qwen3NextConfig

from quire import LLM, SamplingParams
from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Layout, Rank
from quire.executor.inspection.load_plan import plan_load
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.frontend.checkpoint.gguf import make_folder, parts_of
from quire.lora.request import LoRARequest
from tests.executor.models.test_hybrid_models import DELTA, NEMOTRON, save_hybrid
from tests.executor.step.drafting.head_references import (
    HIDDEN,
    NUM_DRAFTS,
    Module,
    Norm,
    Target,
    check_drafts,
    drafts_after,
    rms_norm,
    serve,
    some_requests,
    split_module,
    watched,
    with_heads,
)
from tests.executor.step.test_drafts import check_same, requests_of_all_kinds
from tests.executor.step.test_model_runner import engine_config, prompt_of, request
from tests.executor.test_peft_adapters import trained
from tests.executor.thread_group import on_every_rank
from tests.gguf_files import make_gguf

torch.set_num_threads(1)

_PLACE = "model.layers.2"
DEEPSEEK = Module(_PLACE, f"{_PLACE}.enorm", f"{_PLACE}.hnorm", f"{_PLACE}.eh_proj", f"{_PLACE}.shared_head.norm")
QWEN = Module(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", zero_first=False,
    offset=1.0,
)  # fmt: skip
_MIMO = "model.mtp_layers.0"
MIMO = Module(
    _MIMO, f"{_MIMO}.token_layernorm", f"{_MIMO}.hidden_layernorm", f"{_MIMO}.input_proj", f"{_MIMO}.final_layernorm",
    hidden_first=True,
)  # fmt: skip
# The maker's engine (FastDeploy) runs the model's own norm on the output, and keeps the first embedding.
ERNIE = Module(
    "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "model.norm",
    zero_first=False,
)  # fmt: skip
NEMOTRON_H = Module(
    "mtp.layers.{number}", "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj",
    "mtp.layers.1.final_layernorm", zero_first=False,
)  # fmt: skip
FAMILIES = {
    "deepseek_v3": (DEEPSEEK, {"first_k_dense_replace": 1}),
    "deepseek_v32": (DEEPSEEK, {"first_k_dense_replace": 1}),
    "glm4_moe_lite": (DEEPSEEK, {"first_k_dense_replace": 1}),
    "glm4_moe": (DEEPSEEK, {"first_k_dense_replace": 1, "use_qk_norm": True}),
    "nemotron_h": (NEMOTRON_H, {"mtp_hybrid_override_pattern": "*E"}),
    "qwen3_next": (QWEN, {}),
    "qwen3_5": (QWEN, {}),
    "mimo": (MIMO, {}),
    "ernie4_5_moe": (ERNIE, {"moe_layer_end_index": 1}),
}

HYBRIDS = {
    "qwen3_next": (
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, "Qwen3_5ForCausalLM", DELTA),
    "nemotron_h": (NemotronHConfig, "NemotronHForCausalLM", NEMOTRON),
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Callable[[list[int]], list[int]]]:
    """A checkpoint with a module, and the drafts after known tokens."""
    family = request.param
    module, config = FAMILIES[family]
    if family in HYBRIDS:
        types = ["linear_attention", "full_attention", "full_attention"]
        field = "layer_types"
        if family == "nemotron_h":
            types, field = [*types[:2], "full_attention", "moe"], "layers_block_type"
        kind, architecture, sizes = HYBRIDS[family]
        source = tmp_path_factory.mktemp(family)
        save_hybrid(source, kind, architecture, {**sizes, "num_hidden_layers": len(types), field: types})
    else:
        source = checkpoint("qwen2" if family == "mimo" else family, num_hidden_layers=3, **config)
    folder = tmp_path_factory.mktemp(family) / "checkpoint"
    named = {"architectures": ["MiMoForCausalLM"]} if family == "mimo" else {}
    last = [2, 3] if family == "nemotron_h" else [2]
    own = split_module(source, folder, module, num_layers=len(last), num_nextn_predict_layers=1, **named, **config)
    target = Target(source, 2)
    settings = target.whole.config
    eps = settings.layer_norm_epsilon if family == "nemotron_h" else settings.rms_norm_eps
    token_norm, hidden_norm, norm = (
        own[f"{name}.weight"] for name in (module.token_norm, module.hidden_norm, module.norm)
    )

    def run(token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = target.embed(token_ids)
        if module.zero_first:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        pair = [rms_norm(token_norm, eps, module.offset)(embedded), rms_norm(hidden_norm, eps, module.offset)(hidden)]
        x = torch.cat(pair[::-1] if module.hidden_first else pair, 1) @ own[f"{module.join}.weight"].T
        out = target.run(last, Norm(norm, eps, module.offset), x)
        return out, target.head(out)

    return folder, lambda known: drafts_after(known, target.states(known), run)


def test_drafts_are_those_of_the_module(
    served: tuple[Path, Callable[[list[int]], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = served
    requests = some_requests()
    without = serve(engine_config(folder))(requests)
    generate = serve(with_heads(folder, "mtp"))
    with watched(monkeypatch) as drafted:
        check_same(generate(requests, long_prefill_token_threshold=20, enable_prefix_caching=False), without)
    check_drafts(drafted, expected)


@pytest.fixture(scope="module")
def deepseek(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek") / "checkpoint"
    split_module(checkpoint("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1), folder, DEEPSEEK)
    return folder


def repeating(source: Path, folder: Path) -> Path:
    """Copies a checkpoint with a module so that both repeat the last token for ever."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[DEEPSEEK.join + ".weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_right_drafts_are_accepted(deepseek: Path, tmp_path: Path) -> None:
    """Each decode step brings all drafts, after chunks of prompts, across pages and on cached prefixes."""
    folder = repeating(deepseek, tmp_path / "repeating")
    generate = serve(with_heads(folder, "mtp"))
    requests = [request(f"r{index}", prompt_of(index % 5, 3 + 11 * index), max_tokens=33) for index in range(7)]
    for _ in range(2):
        for name, entries in generate(requests, depth=1, long_prefill_token_threshold=20).items():
            sizes = [len(delta.token_ids) for delta in entries]
            assert set(sizes[1:-1]) == {1 + NUM_DRAFTS}, (name, sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3, "max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"num_pages": 60, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_no_token_changes(deepseek: Path, options: dict[str, int]) -> None:
    requests = requests_of_all_kinds()
    without = serve(engine_config(deepseek))(requests, enable_prefix_caching=False)
    generate = serve(with_heads(deepseek, "mtp", sampling="probabilistic"))
    check_same(generate(requests, **options), without)
    check_same(generate(requests, **options), without)  # on the pages that the prefix cache found


def test_two_ranks_propose_the_same(deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = some_requests()
    with watched(monkeypatch) as alone:
        whole = serve(with_heads(deepseek, "mtp"))(requests, depth=1)
    config = with_heads(deepseek, "mtp", layout=Layout(tensor=2), executor="mp")
    with watched(monkeypatch) as together:
        first, second = on_every_rank(2, lambda group: serve(config, group)(requests, depth=1))
    check_same(first, whole)
    check_same(second, whole)
    assert {(tuple(known), tuple(drafts)) for known, drafts in together} == {
        (tuple(known), tuple(drafts)) for known, drafts in alone
    }


def test_the_memory_plan_counts_the_module(deepseek: Path) -> None:
    """The target's embedding and head count once."""
    alone = Worker(engine_config(deepseek), Rank(), ParallelGroup()).load()
    both = Worker(with_heads(deepseek, "mtp"), Rank(), ParallelGroup()).load()
    stored = load_file(deepseek / "model.safetensors")
    module = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith(f"{_PLACE}."))
    ends = stored["model.embed_tokens.weight"].nbytes + stored["lm_head.weight"].nbytes
    added = both.weights_bytes - alone.weights_bytes  # packed layers may be padded
    assert module <= added < module + ends / 2
    assert [layer for group in both.kv_groups for layer in group.layers] == [0, 1, 2]
    assert both.kv_cache_bytes / both.num_pages == pytest.approx(1.5 * alone.kv_cache_bytes / alone.num_pages)
    [planned] = plan_load(with_heads(deepseek, "mtp"), None).ranks
    assert planned.weights_bytes == both.weights_bytes
    assert planned.page_bytes * both.num_pages == both.kv_cache_bytes


@pytest.mark.parametrize("has_head", [False, True])
def test_the_module_of_a_gguf_file_is_the_same(
    has_head: bool,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file of GLM 4.5, whose last block is the module, with a head of its own or without."""
    sizes = {"moe_intermediate_size": 32, "use_qk_norm": True, "first_k_dense_replace": 1}
    folder = tmp_path / "checkpoint"
    split_module(
        checkpoint("glm4_moe", num_hidden_layers=3, norm_topk_prob=True, n_group=1, topk_group=1, **sizes),
        folder,
        DEEPSEEK,
        num_nextn_predict_layers=1,
    )
    if has_head:
        tensors = load_file(folder / "model.safetensors")
        head = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(2)) * 0.3
        save_file(tensors | {f"{_PLACE}.shared_head.head.weight": head}, folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "whole")
    config = json.loads((folder / "config.json").read_bytes())
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    metadata = {
        "expert_shared_count": 1, "leading_dense_block_count": 1, "rope.dimension_count": 8,
        "expert_weights_scale": config.get("routed_scaling_factor", 1.0), "nextn_predict_layers": 1,
    }  # fmt: skip
    make_gguf(tmp_path / "whole", tmp_path / "model.gguf", "glm4moe", metadata=metadata)
    requests = some_requests()
    with watched(monkeypatch) as expected:
        serve(with_heads(folder, "mtp"))(requests, depth=1)
    with watched(monkeypatch) as drafted:
        serve(with_heads(make_folder(parts_of(tmp_path / "model.gguf")), "mtp"))(requests, depth=1)
    assert len(drafted) > 20
    assert drafted == expected


def test_a_checkpoint_without_a_module_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"no layer for multi-token prediction .* another method than mtp"):
        Worker(with_heads(checkpoint("llama"), "mtp"), Rank(), ParallelGroup()).load()


def test_an_adapter_of_the_vocabulary_is_the_targets_alone(deepseek: Path, tmp_path: Path) -> None:
    """The module reads the target's embedding and head, in passes of other tokens than the step's."""
    trained(deepseek, tmp_path, target_modules=["embed_tokens", "lm_head"])
    prompts: list[Any] = [{"prompt_token_ids": prompt_of(number, 12)} for number in range(3)]
    adapter = LoRARequest("mine", 1, str(tmp_path))
    outputs = []
    for speculation in (None, {"method": "mtp", "num_speculative_tokens": 2, "enable_adaptive_verification": False}):
        with LLM(
            str(deepseek), skip_tokenizer_init=True, dtype="float32", enable_lora=True, max_model_len=64,
            num_gpu_blocks_override=40, speculative_config=speculation, disable_log_stats=False,
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
            answers = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapter, None, adapter])
            outputs.append([answer.outputs[0].token_ids for answer in answers])
            drafts = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_drafts"]
    assert outputs[0] == outputs[1]
    assert drafts[0] > 0
