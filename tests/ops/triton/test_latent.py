"""Latent attention as kernels, in decode steps and prompts, and to selected keys, against plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.latent import EagerLatent
from quire.ops.eager.linear import PlainLinear
from quire.ops.eager.selection import attend_selected
from quire.ops.latent import Selection
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.latent import heads_of_program
from tests.ops.test_latent import Sparse, Step
from tests.ops.triton.conftest import DEVICE

LENGTHS = [37, 300, 1, 129]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("fell back to plain torch")

    monkeypatch.setattr(EagerLatent, "latent_attention", fail)
    monkeypatch.setattr(EagerLatent, "partial_latent_attention", fail)


def on_device(step: Step) -> Step:
    for name in ("q", "q_rotated", "slots"):
        setattr(step, name, getattr(step, name).to(DEVICE))
    whole = step.cache._base
    assert whole is not None
    step.cache = whole.to(DEVICE)[:, : step.block_size, : step.cache.shape[2]]
    return step


def decode_step(lengths: list[int] = LENGTHS, **options: Any) -> Step:
    return on_device(Step(TritonBackend(), [(1, length) for length in lengths], **options))


SHAPES: list[dict[str, Any]] = [
    {"heads": 4, "rank": 24, "rotary_dim": 8},
    {"heads": 16, "rank": 64, "rotary_dim": 16, "dtype": torch.bfloat16, "block_size": 64},
    {"heads": 40, "rank": 32, "rotary_dim": 40, "dtype": torch.float16, "block_size": 8},
    {"heads": 1, "rank": 512, "rotary_dim": 64, "dtype": torch.bfloat16},
    {"heads": 6, "rank": 32, "rotary_dim": 8, "more": (24,)},
]


def assert_right(step: Step) -> None:
    out, lse = step.run_partly()
    expected, sums = step.expected_parts()
    tolerance = 2e-5 if step.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), sums.cpu(), atol=tolerance, rtol=tolerance)
    assert torch.equal(step.run(), out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_models(shape: dict[str, Any], by_kernels: None) -> None:
    step = decode_step(**shape)
    assert_right(step)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_beside_decode_steps(shape: dict[str, Any], by_kernels: None) -> None:
    assert_right(on_device(Step(TritonBackend(), [(9, 70), (1, 40), (33, 33), (2, 2)], **shape)))


def test_a_decode_step_has_the_same_bits_beside_prompts(by_kernels: None) -> None:
    step = on_device(Step(TritonBackend(), [(1, 300), (5, 20)], heads=2, rank=16, rotary_dim=8))
    batch = step.ops.attention_batch(
        step.query_lens[:1], step.seq_lens[:1], step.tables[:1], step.slots[:1], block_size=step.block_size
    )
    alone = step.ops.latent.latent_attention(step.q[:1], step.q_rotated[:1], step.cache, batch, scale=step.scale)
    assert torch.equal(step.run()[:1], alone)


@pytest.mark.parametrize("shape", [*SHAPES[:3], {"heads": 3, "rank": 32, "rotary_dim": 16, "cache_dtype": torch.int8}])
def test_keys_that_are_selected(shape: dict[str, Any], by_kernels: None) -> None:
    step = on_device(Step(TritonBackend(), [(2, 90), (1, 30)], **shape))
    slots = torch.full((3, 70), int(step.tables[0][0]) * step.block_size, dtype=torch.int32)
    counts = torch.tensor([67, 1, 30])
    random = torch.Generator().manual_seed(1)
    for token, (row, count) in enumerate(zip([0, 0, 1], counts.tolist(), strict=True)):
        positions = torch.randperm(int(step.seq_lens[row]), generator=random)[:count]
        pages = torch.from_numpy(np.asarray(step.tables[row]))[positions // step.block_size]
        slots[token, :count] = pages * step.block_size + positions % step.block_size
    expected = attend_selected(
        step.q.cpu(), step.q_rotated.cpu(), step.cache.cpu(), Selection(slots, counts), step.scale
    )  # fmt: skip
    there = Selection(slots.to(DEVICE), counts.to(DEVICE))
    got = step.ops.latent.latent_attention(
        step.q, step.q_rotated, step.cache, step.batch(), scale=step.scale, selection=there
    )  # fmt: skip
    tolerance = 2e-5 if step.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_caches(cache_dtype: torch.dtype, dtype: torch.dtype, by_kernels: None) -> None:
    step = decode_step([150, 3], heads=3, rank=32, rotary_dim=16, dtype=dtype, cache_dtype=cache_dtype)
    tolerance = 2e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(step.run().cpu().double(), step.expected(), atol=tolerance, rtol=tolerance)


def test_a_row_alone_has_the_bits_of_a_row_in_company(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its splits are merged by one program, by the last of several, or by one because no memory is left."""
    step = decode_step([300, 300, 40], heads=2, rank=16, rotary_dim=8)
    together = step.run()

    def alone() -> Tensor:
        batch = step.ops.attention_batch(
            step.query_lens[:1], step.seq_lens[:1], step.tables[:1], step.slots[:1], block_size=step.block_size
        )
        return step.ops.latent.latent_attention(
            step.q[:1], step.q_rotated[:1], step.cache, batch, scale=step.scale
        )  # fmt: skip

    outs = [alone()]
    monkeypatch.setattr(step.ops._attention, "num_programs", 1)
    outs += [step.run()[:1], alone()]
    monkeypatch.setattr("quire.ops.triton.attention.MAX_PART_BYTES", 0)
    outs.append(alone())
    assert all(torch.equal(out, together[:1]) for out in outs)


@pytest.mark.parametrize(
    "options", [{"rank": 30, "rotary_dim": 6}, {"block_size": 5, "rank": 32, "rotary_dim": 8}], ids=str
)
def test_what_torch_takes(options: dict[str, Any]) -> None:
    step = decode_step(**options)
    eager = Step(EagerBackend(PlainLinear()), [(1, length) for length in LENGTHS], **options)
    torch.testing.assert_close(step.run().cpu(), eager.run(), atol=2e-5, rtol=1e-4)


def test_all_programs_have_equally_many_heads() -> None:
    assert [heads_of_program(count) for count in (1, 16, 20, 40, 96, 128, 17)] == [1, 16, 20, 20, 32, 32, 17]


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_tokens_that_are_selected(cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"rank": 24, "rotary_dim": 8, "size": 24}
    rows = [(1, length) for length in LENGTHS]
    step = Sparse(TritonBackend(), rows, cache_dtype=cache_dtype, **sizes)
    whole = step.cache._base
    assert whole is not None
    for name in ("index_q", "index_weights", "slots"):
        setattr(step, name, getattr(step, name).to(DEVICE))
    begin = step.latent_cache.shape[2]
    step.key_cache = whole.to(DEVICE)[:, : step.block_size, begin : begin + step.key_cache.shape[2]]
    expected = {top_k: step_chosen(step, top_k) for top_k in (16, 500)}
    monkeypatch.setattr(EagerLatent, "select_tokens", None)
    for top_k, chosen in expected.items():
        slots, counts = step.select(top_k)
        assert slots.shape == (len(rows), top_k)
        assert counts.tolist() == [min(length, top_k) for length in LENGTHS]
        for row, positions in enumerate(chosen):
            page, offset = np.divmod(np.array(positions), step.block_size)
            own = step.tables[row][page] * step.block_size + offset
            assert slots[row, : counts[row]].tolist() == own.tolist()
            assert set(slots[row, counts[row] :].tolist()) <= {int(own[0])}


def step_chosen(step: Sparse, top_k: int) -> list[list[int]]:
    queries = step.index_q, step.index_weights
    step.index_q, step.index_weights = (each.cpu() for each in queries)
    chosen = step.chosen(top_k)
    step.index_q, step.index_weights = queries
    return chosen
