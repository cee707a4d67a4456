"""Dual chunk attention against its formula with whole matrices, which takes the place of attention in Transformers."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.ops.cpu.native import NativeBackend
from tests.executor.models.test_dense_models import _Recorded as Recorded
from tests.executor.paged_driver import Checkpoints, PagedDriver, batch_tolerance, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

DUAL = {"chunk_size": 24, "local_size": 7}
VARIANTS = {
    "qwen2": DUAL | {"original_max_position_embeddings": 30},
    "qwen3_moe": DUAL,
    "qwen2_moe": {"chunk_size": 40, "local_size": 24},  # some distances between neighbouring chunks are cut, too
}
TOKENS = torch.randint(3, 300, (101,), generator=torch.Generator().manual_seed(0)).tolist()  # six chunks


def spec_of(folder: Path, dual: dict[str, Any], **overrides: Any) -> ModelSpec:
    return read_spec(folder, dual_chunk_attention_config=dual, **overrides)


def expected_logprobs(folder: Path, dual: dict[str, Any], token_ids: list[int]) -> Tensor:
    """Transformers' class with positions of 0, which rotate nothing, and with an attention that rotates."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theta = model.config.rope_parameters["rope_theta"]
    AttentionInterface.register("whole-matrices", partial(_attend, dual=dual, theta=theta))
    model.set_attn_implementation("whole-matrices")
    with torch.inference_mode():
        zeros = torch.zeros(1, len(token_ids), dtype=torch.int64)
        return model(torch.tensor([token_ids]), position_ids=zeros).logits[0].log_softmax(dim=-1)


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, *, scaling: float, dual: dict[str, Any], theta: float,
    **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    length = dual["chunk_size"] - dual["local_size"]
    position = torch.arange(q.shape[2])
    place, chunk = position % length, position // length
    k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
    k = _rotated(k, place, theta)

    def scores(query_places: Tensor) -> Tensor:
        return _rotated(q, query_places, theta) @ k.transpose(2, 3) * scaling

    distance = chunk.unsqueeze(1) - chunk
    farthest = torch.full_like(place, min(2 * length - 1, dual["chunk_size"]))
    far = torch.where(distance == 1, scores((place + length).clamp(max=dual["chunk_size"])), scores(farthest))
    weights = torch.where(distance == 0, scores(place), far)
    if trained := dual.get("original_max_position_embeddings"):
        heat = [max(1, 0.1 * math.log((n + 1) / trained) + 1) ** 2 for n in position.tolist()]
        weights *= torch.tensor(heat).unsqueeze(1)
    weights = weights.masked_fill(position > position.unsqueeze(1), -torch.inf).softmax(dim=-1)
    return (weights @ v).transpose(1, 2), None


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = positions.unsqueeze(1) * theta ** -(torch.arange(half) / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def run_in_parts(model: Model) -> Tensor:
    """Logits at all positions, in chunks of odd sizes, beside another request, the last tokens one by one."""
    driver, got, position = PagedDriver(model, 2, 128, block_size=4), [], 0
    for size in [16, 1, 30, 20, *[1] * len(TOKENS)]:
        if part := TOKENS[position : position + size]:
            got.append(driver.step({1: [7, 8, 9], 0: part} if position % 3 == 0 else {0: part})[0])
        position += size
    return torch.cat(got)


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_those_of_the_formula(variant: str, checkpoint: Checkpoints) -> None:
    folder, dual = checkpoint(variant), VARIANTS[variant]
    spec = spec_of(folder, dual)
    model, expected = load_model(spec), expected_logprobs(folder, dual, TOKENS)
    assert_near = partial(torch.testing.assert_close, atol=1e-4, rtol=0)
    assert_near(run_in_parts(model).log_softmax(dim=-1), expected)
    plain = run_in_parts(load_model(read_spec(folder))).log_softmax(dim=-1)
    assert (plain - expected)[: dual["chunk_size"] - dual["local_size"]].abs().max() < 1e-4
    assert (plain - expected).abs().max() > 0.01, "chunks must make a difference"

    def logits(group: ParallelGroup) -> Tensor:
        driver = PagedDriver(load_model(spec, group=group), 1, 128, block_size=4)
        return torch.cat([driver.step({0: TOKENS[:60]})[0], driver.step({0: TOKENS[60:]})[0]])

    for of_rank in on_every_rank(2, logits):
        assert_near(of_rank.log_softmax(dim=-1), expected)


def test_tokens_depend_neither_on_the_batch_nor_on_chunks_or_a_cached_prefix(checkpoint: Checkpoints) -> None:
    model = load_model(spec_of(checkpoint("qwen2"), VARIANTS["qwen2"]))
    driver = PagedDriver(model, 6, 128, block_size=4)
    assert_same = partial(torch.testing.assert_close, atol=batch_tolerance(driver.ops), rtol=0)
    alone = PagedDriver(model, 1, 128, block_size=4).step({0: TOKENS})[0]
    # Beside shorter ones, among them one within its first chunk.
    together = driver.step({0: TOKENS[5:9], 1: TOKENS, 2: TOKENS[20:70], 3: TOKENS[:40]})
    assert_same(together[1], alone)
    assert_same(together[0], PagedDriver(model, 1, 128, block_size=4).step({0: TOKENS[5:9]})[0])
    assert_same(run_in_parts(model), alone)
    driver.block_tables[:, 4, :10] = driver.block_tables[:, 3, :10]
    driver.tokens[4] = TOKENS[:40]
    assert_same(driver.step({4: TOKENS[40:]})[4], alone[40:])
    assert_same(driver.step({5: TOKENS}, only_last=True)[5], alone[-1:])


def test_sequences_of_one_chunk_have_plain_attention(checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen2")
    one = load_model(spec_of(folder, VARIANTS["qwen2"], max_position_embeddings=17))
    driver = PagedDriver(load_model(read_spec(folder)), 1, 32)
    assert torch.equal(PagedDriver(one, 1, 32).step({0: TOKENS[:17]})[0], driver.step({0: TOKENS[:17]})[0])


@pytest.mark.parametrize(("max_model_len", "is_recorded"), [(17, True), (18, False)])
@torch.inference_mode()
def test_a_step_is_recorded_if_no_sequence_grows_beyond_a_chunk(
    max_model_len: int, is_recorded: bool, checkpoint: Checkpoints
) -> None:
    """Another step of as many rows has more parts. In one byte a weight, because oneDNN's layers are not recorded."""
    spec = spec_of(checkpoint("qwen2"), DUAL, max_position_embeddings=max_model_len)
    context = model_context(spec, quantization="int8")
    if not isinstance(context.ops, NativeBackend):
        pytest.skip("plain torch is not recorded")
    model = build_model(spec, context)
    driver = PagedDriver(model, 1, 32)
    driver.step({0: TOKENS[:5]})
    driver.model = recorded = Recorded(model, context.ops)  # type: ignore[assignment]
    driver.step({0: [3]})
    assert (recorded.recording is not None) == is_recorded


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {}, "--max-model-len 17 or less"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, "with sliding windows"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "a rope that scales"),
    ],
)
def test_what_has_no_dual_chunks_is_refused_beyond_the_first(
    family: str, overrides: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    spec = spec_of(checkpoint(family), DUAL, layer_types=None, **overrides)
    with pytest.raises(ModelLoadError, match=message):
        load_model(spec)
