"""Families with multi-head latent attention against Transformers, and the latent cache in the memory of a worker."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Rank
from quire.executor.models.mixtures.deepseek_sparse import indexer_types
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.ops.cache_rows import LARGEST_CODE
from quire.ops.cpu.native import NativeBackend
from tests.checkpoints import LATENT_SIZES
from tests.executor.models.test_dense_models import _Recorded as Recorded
from tests.executor.models.test_models import expected_logprobs, prompts
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.pretend_device import IS_ACCELERATED
from tests.executor.step.test_model_runner import (
    LIMITS,
    engine_config,
)
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
}  # fmt: skip

HOT = {**YARN, "mscale": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
"""Queries grow."""

YOUTU = {"pad_token_id": None}  # Transformers clears the padding token's embedding when it loads this family

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {"num_hidden_layers": 3, "rope": YARN}),
    "deepseek_v2-lite": ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 3, "rope": {**YARN, "mscale": 1.0}}),
    "deepseek_v3-kimi": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "rope": {**YARN, "factor": 32.0}}),
    "deepseek_v3-biases": ("deepseek_v3", {"attention_bias": True, "norm_topk_prob": False, "q_lora_rank": None}),
    "deepseek_v32": ("deepseek_v32", {"num_hidden_layers": 3, "rope": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {"num_hidden_layers": 3}),
    "glm_moe_dsa": ("glm_moe_dsa", {"attention_bias": True}),
    "glm_moe_dsa-shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}),
    "minicpm3": ("minicpm3", {"tie": True, "dim_model_base": 24, "scale_depth": 6.0, "scale_emb": 0.5}),
    "minicpm3-untied": ("minicpm3", {"v_head_dim": None, "dim_model_base": 48, "scale_depth": 0.7, "scale_emb": 3}),
    "mistral4": ("mistral4", {"rope": HOT, "first_k_dense_replace": 1}),
    "mistral4-shares": ("mistral4", {"rope": HOT, "norm_topk_prob": False, "routed_scaling_factor": 0.8}),
    "youtu": ("youtu", YOUTU),
    "youtu-tied": ("youtu", {**YOUTU, "tie": True}),
    "youtu-biases": ("youtu", {**YOUTU, "attention_bias": True}),
    "youtu-direct-queries": ("youtu", {**YOUTU, "q_lora_rank": None}),
    "youtu-halves": ("youtu", {**YOUTU, "rope_interleave": False}),
    "youtu-yarn": ("youtu", {**YOUTU, "rope": YARN}),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    folder = checkpoint(family, **options)
    spec = read_spec(folder)
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 70))

    # In chunks, the last tokens one by one, beside another request.
    driver = PagedDriver(model, 2, 200)
    got = []
    position = 0
    for size in [16, 1, 30, 20, *[1] * len(token_ids)]:
        part = token_ids[position : position + size]
        if part:
            got.append(driver.step({1: [7, 8, 9, 10], 0: part} if position % 3 == 0 else {0: part})[0])
        position += size
    expected = expected_logprobs(folder, token_ids)
    torch.testing.assert_close(torch.cat(got).log_softmax(dim=-1), expected, atol=1e-4, rtol=0)

    # One pass checks that each output is the likeliest token after those before it: by induction, greedy search.
    prompt = token_ids[:20]
    output = PagedDriver(model, 1, 100).greedy([prompt], 64)[0]
    likeliest = expected_logprobs(folder, prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    assert output == likeliest.tolist()
    assert len(set(output)) > 8, "a degenerate output proves little"


CHANGED = {"deepseek_v32": 0.25, "axk2": 0.15}
"""By int8, where a token sees 20 others: other ones, if index keys change a little."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4", "axk1", "axk2"])
def test_latents_in_few_bits_change_little(family: str, tmp_path: Path) -> None:
    """The mean change of a log-probability, against a cache of 16 bits; a prompt in chunks reads the same codes.

    The last two are classes of Transformers, of which one runs row by row.
    """
    write_checkpoint(tmp_path, family)
    spec = read_spec(tmp_path)
    model, token_ids = load_model(spec), list(range(3, 103))

    def logprobs(dtype: torch.dtype, *sizes: int) -> Tensor:
        driver, rest, got = PagedDriver(model, 1, 128, dtype=dtype), list(token_ids), []
        for size in sizes or (len(rest),):
            got.append(driver.step({0: rest[:size]})[0])
            rest = rest[size:]
        return torch.cat(got).log_softmax(dim=-1)

    plain = logprobs(torch.bfloat16)
    changes = {dtype: (logprobs(dtype) - plain).abs().mean().item() for dtype in LARGEST_CODE}
    assert changes[torch.int8] < CHANGED.get(family, 0.05)
    assert changes[torch.int8] < changes[torch.float8_e4m3fn] < changes[torch.float8_e5m2] < changes[torch.uint8]
    # Plain torch sums other shapes in another order, after which a number may be rounded to the next code.
    tolerance = 5e-3 if IS_ACCELERATED else 1e-4
    torch.testing.assert_close(logprobs(torch.int8, 17, 1, 30, 200), logprobs(torch.int8), atol=tolerance, rtol=0)


FAMILIES = [
    "deepseek_v2-groups",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa-shared",
    "minicpm3",
    "youtu",
]
"""One variant each."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", FAMILIES)
def test_tokens_do_not_depend_on_the_batch(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    model = load_model(spec)
    many = prompts(17, spec.vocab_size)
    together = PagedDriver(model, len(many), 128).greedy(many, 20)
    for row in (0, 11):
        assert PagedDriver(model, 1, 128).greedy([many[row]], 20)[0] == together[row]


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", FAMILIES)
def test_last_tokens_alone_are_those_of_the_whole(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    model = load_model(spec)
    whole, last = PagedDriver(model, 5, 128), PagedDriver(model, 5, 128)
    some = dict(enumerate(prompts(4, spec.vocab_size)))
    for feed in (some, {4: [3, 4, 5], 1: [6], 0: [7, 8]}, {row: [9] for row in range(5)}):
        expected, got = whole.step(feed), last.step(feed, only_last=True)
        for row in feed:
            torch.testing.assert_close(got[row], expected[row][-1:], atol=1e-4, rtol=0)
    for cache, other in zip(last.caches, whole.caches, strict=True):
        torch.testing.assert_close(cache.pages, other.pages, equal_nan=True, atol=1e-5, rtol=0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", FAMILIES)
def test_ranks_together_are_the_whole_model(variant: str, checkpoint: Checkpoints) -> None:
    """Each rank has a part of the heads, and all latents."""
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    some = dict(enumerate(prompts(3, spec.vocab_size)))

    def run(group: ParallelGroup) -> list[Tensor]:
        driver = PagedDriver(load_model(spec, group=group), 3, 80)
        logits = [*driver.step(some).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]
        return [*logits, *(cache.pages[1:] for cache in driver.caches)]

    whole = run(ParallelGroup())
    for of_rank in on_every_rank(2, run):
        for got, expected in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_decode_steps_with_a_selection_are_recorded(checkpoint: Checkpoints) -> None:
    """Of one byte a weight, because oneDNN's layers cannot be recorded."""
    family, options = VARIANTS["glm_moe_dsa-shared"]
    spec = read_spec(checkpoint(family, **options))
    context = model_context(spec, quantization="int8")
    if not isinstance(context.ops, NativeBackend):
        pytest.skip("plain torch is not recorded")
    with contextlib.closing(context.weights):
        model = build_model(spec, context)
    driver = PagedDriver(model, 2, 64)
    driver.step({0: list(range(40)), 1: [5, 6]})
    driver.model = recorded = Recorded(model, context.ops)  # type: ignore[assignment]
    driver.step({0: [3], 1: [4]}, only_last=True)
    assert recorded.recording is not None
    expected = recorded.result.clone()
    recorded.result.zero_()
    recorded.recording.run()
    assert torch.equal(recorded.result, expected)


def test_half_precision_stays_near(checkpoint: Checkpoints) -> None:
    folder = checkpoint("youtu", **YOUTU)
    model = load_model(read_spec(folder, dtype="bfloat16"))
    token_ids = list(range(3, 60))
    driver = PagedDriver(model, 1, 64, dtype=torch.bfloat16)
    got = driver.step({0: token_ids})[0].float().log_softmax(dim=-1)
    assert (got - expected_logprobs(folder, token_ids)).abs().mean() < 0.1


@pytest.mark.parametrize(("variant", "num_index_layers"), [("deepseek_v2-lite", 0), ("glm_moe_dsa-shared", 1)])
def test_pages_hold_latents_and_index_keys(variant: str, num_index_layers: int, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    ready = Worker(engine_config(checkpoint(family, **options)), Rank(), ParallelGroup()).load()
    numbers = 2 * (LATENT_SIZES["kv_lora_rank"] + LATENT_SIZES["qk_rope_head_dim"])  # of each token, in two layers
    numbers += num_index_layers * 20
    assert [group.page_bytes for group in ready.kv_groups] == [LIMITS.block_size * numbers * 4]


def test_a_token_sees_the_chosen_tokens_alone(checkpoint: Checkpoints) -> None:
    folder = checkpoint("deepseek_v32")
    token_ids = list(range(3, 40))
    sparse, dense = (
        PagedDriver(load_model(read_spec(folder, index_topk=top_k)), 1, 64).step({0: token_ids})[0]
        for top_k in (11, 37)
    )
    torch.testing.assert_close(sparse[:11], dense[:11], atol=1e-5, rtol=0)
    assert bool(((sparse - dense)[11:].abs().amax(dim=1) > 1e-3).all())


def test_layers_without_an_indexer_are_read_in_all_notations(checkpoint: Checkpoints) -> None:
    def types(**config: object) -> Sequence[str]:
        spec = read_spec(checkpoint("glm_moe_dsa"), **{"indexer_types": None, "num_hidden_layers": 6, **config})
        return [name[0] for name in indexer_types(spec)]

    assert types(index_topk_freq=2) == list(types(index_topk_pattern="FFSFSF")) == list("ffsfsf")
    assert types(index_topk_freq=3, index_skip_topk_offset=1) == list("fssfss")
    assert types() == list("ffffff")
    with pytest.raises(ModelLoadError, match="indexer_types must name full or shared for each of 6 layers"):
        types(indexer_types=["shared", *["full"] * 5])


def test_a_config_without_a_size_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match="lacks 'kv_lora_rank'"):
        load_model(read_spec(checkpoint("youtu", **YOUTU), kv_lora_rank=None))
    with pytest.raises(ModelLoadError, match="lacks 'index_topk'"):
        load_model(read_spec(checkpoint("deepseek_v32"), index_topk=None))
    with pytest.raises(ModelLoadError, match="topk_method 'noaux_tc' is not supported in DeepseekV2ForCausalLM"):
        load_model(read_spec(checkpoint("deepseek_v2"), topk_method="noaux_tc"))


def test_layers_for_multi_token_prediction_are_left_out(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their tensors follow those of the last layer, and the model is the one without them."""
    folder = tmp_path / "with more layers"
    shutil.copytree(checkpoint("deepseek_v3"), folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    save_file({**tensors, **extra, "model.layers.2.eh_proj.weight": torch.ones(64, 128)}, folder / "model.safetensors")
    worker = Worker(engine_config(folder), Rank(), ParallelGroup())
    with caplog.at_level("INFO"):
        ready = worker.load()
    assert len(ready.kv_groups[0].layers) == 2
    assert "layers for multi-token prediction are not loaded: 1" in caplog.text
    token_ids = list(range(40))
    driver = PagedDriver(worker.get_model(), 1, 64, device="cpu")
    got = driver.step({0: token_ids})[0].log_softmax(dim=-1)
    torch.testing.assert_close(got, expected_logprobs(checkpoint("deepseek_v3"), token_ids), atol=1e-4, rtol=0)
