"""Keys and values as codes with a scale for each token and head: their rounding, and attention that reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend, NewHeads
from quire.ops.cache_rows import LARGEST_CODE, SCALE_BYTES, decode, encode, row_size
from quire.ops.eager import attention, attention_plan, backend, latent, selection
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.latent import Selection
from tests.ops.test_attention import GARBAGE, MIXED, Step

torch.set_num_threads(1)

CODES = list(LARGEST_CODE)
STEPS = {torch.int8: 1 / 127, torch.uint8: 1 / 7, torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2}
"""Distances of codes: of integers as a part of the greatest number, of floats as a part of the number itself."""


def note_decoded(monkeypatch: pytest.MonkeyPatch, cache_dtype: torch.dtype) -> list[int]:
    """The bytes that plain torch decodes at once, of codes in float32, grow with each call."""
    sizes: list[int] = []

    def noted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            numbers = function(*args)
            sizes.append(numbers.numel() * (4 if cache_dtype in LARGEST_CODE else numbers.element_size()))
            return numbers

        return run

    for module in (attention, backend, latent, selection):
        for name in {"decode", "decode_parts"} & vars(module).keys():
            monkeypatch.setattr(module, name, noted(getattr(module, name)))
    return sizes


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_are_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 50]).view(3, 1)
    x[0, 0] = 0
    rows = encode(x, dtype)
    assert rows.shape == (5, 3, row_size(40, dtype))
    got = decode(rows, torch.float32)
    most = x.abs().amax(dim=-1, keepdim=True)
    size = x.abs().clamp(min=2**-14 * most) if dtype.is_floating_point else most
    assert ((got - x).abs() <= STEPS[dtype] / 2 * size * 1.001).all()
    assert not got[0, 0].any()
    torch.testing.assert_close(got.abs().amax(dim=-1, keepdim=True), most)  # the greatest number has a code


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_rows_are_written_and_read(ops: Backend, dtype: torch.dtype, source: torch.dtype) -> None:
    """The bytes of plain torch, but for numbers half-way between two codes; what is not finite has become so."""
    head_dim, slots = 36, torch.tensor([7, 2, 11])
    k, v = torch.randn(2, 3, 2, head_dim, generator=torch.Generator().manual_seed(1)).to(source)
    k[0, 0, 3], k[1, 1, 0] = torch.nan, torch.inf
    cache = torch.zeros(ops.kv_cache_shape(3, 4, 2, head_dim, dtype), dtype=torch.uint8).view(dtype)
    ops.write_kv(k, v, cache, slots)
    written = cache.view(torch.uint8).flatten(3).any(dim=-1).sum()
    assert written == 3 * 2 * 2 or cache.shape[3] == 4
    for stored, given in zip(ops.read_kv(cache, slots), (k, v), strict=True):
        expected = decode(encode(given.nan_to_num(0.0, 1e18, -1e18), dtype), torch.float32)
        assert stored.isfinite().all()
        step = expected.abs().amax(dim=-1, keepdim=True) * max(STEPS[dtype], 1e-3)
        assert ((stored - expected).abs() <= 1.001 * step).all()
        assert (stored == expected).float().mean() > 0.97


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_rows_have_the_scales_of_their_heads(ops: Backend, dtype: torch.dtype, source: torch.dtype) -> None:
    """Codes are quotients, rounded; what a scale does not reach has the greatest code, and a NaN has zero."""
    head_dim, slots = 36, torch.tensor([7, 2, 11])
    heads = torch.randn(3, 7, head_dim, generator=torch.Generator().manual_seed(1)).to(source)
    heads[0, 3, 3], heads[1, 6, 0], heads[2, 6, 5] = torch.nan, torch.inf, -torch.inf
    scales = torch.tensor([[1.0, 0.37], [2.5, 0.011]]) / LARGEST_CODE[dtype]
    cache = torch.zeros(ops.kv_cache_shape(3, 4, 2, head_dim, dtype), dtype=torch.uint8).view(dtype)
    same = cache.clone()
    k, v = heads[:, 3:5], heads[:, 5:]
    ops.write_kv(k, v, cache, slots, scales)
    for stored, given, own in zip(ops.read_kv(cache, slots), (k, v), scales.unsqueeze(-1), strict=True):
        quotients = (given.nan_to_num(0.0, 1e30, -1e30).float() / own).clamp(-LARGEST_CODE[dtype], LARGEST_CODE[dtype])
        codes = quotients.to(dtype).float() if dtype.is_floating_point else quotients.round()
        assert torch.equal(stored, codes * own)
    no_rotation = torch.empty(3, 1, 0, dtype=source)
    ops.rotate_and_store(NewHeads(heads, no_rotation, no_rotation, same, slots, scales=scales))
    assert torch.equal(same.view(torch.uint8), cache.view(torch.uint8))


def test_a_plain_cache_has_no_use_for_scales(ops: Backend) -> None:
    k, v = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(1))
    cache, slots = torch.zeros(ops.kv_cache_shape(3, 4, 2, 8, torch.float32)), torch.tensor([7, 2, 11])
    ops.write_kv(k, v, cache, slots, torch.full((2, 2), 1e-3))
    assert all(map(torch.equal, ops.read_kv(cache, slots), (k, v)))


def test_four_bits_need_an_even_head() -> None:
    with pytest.raises(ValueError, match="heads and latents of an even size, got 5; use one of eight bits"):
        row_size(5, torch.uint8)
    assert row_size(128, torch.uint8) == 64 + SCALE_BYTES


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "options"),
    [
        ((4, 2), 32, 16, {}),
        ((6, 1), 128, 5, {"window": 33}),
        ((3, 3), 84, 8, {"softcap": 5.0, "chunk": 64}),
        ((4, 2), 64, 16, {"sinks": torch.tensor([0.3, -1, 2, 0.0]), "slopes": torch.tensor([0.1, 0.2, 0.01, 0.3])}),
    ],
    ids=["plain", "window", "softcap-chunk", "sinks-slopes"],
)
def test_attention_reads_codes_in_place(
    ops: Backend, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int, options: dict
) -> None:
    """As exactly as plain numbers: those that the codes stand for."""
    num_heads, num_kv_heads = heads
    step = Step(
        ops, MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        cache_dtype=dtype, page_gap=16,
    )  # fmt: skip
    got, expected = step.run(**options).double(), step.expected(**options)
    tolerance = 3e-2 * STEPS[dtype] + 2e-5  # a few numbers half-way between two codes may have the other one
    assert (got - expected).abs().mean() < 2e-5
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("cache_dtype", [*CODES, None])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_another_kind_of_layer_left_behind_does_no_harm(
    ops: Backend, cache_dtype: torch.dtype | None, garbage: int | None, dtype: torch.dtype
) -> None:
    """Plain torch reads masked positions, too. The last token of both rows' selections is not written."""
    step, own = (
        Step(ops, [(1, 37), (5, 40)], dtype=dtype, cache_dtype=cache_dtype, garbage=each) for each in (garbage, 0)
    )
    for form in ({}, {"softcap": 5.0, "window": 33}):
        assert torch.equal(step.run(**form), own.run(**form))
    slots = torch.from_numpy(step.block_tables[[0, 1, 1, 1, 1, 1], 2:3] * 16) + torch.tensor([0, 3, 4, 15])
    selection = Selection(slots.int(), torch.full((6,), 3))
    got, expected = (
        each.ops.selected_attention(each.q, each.kv_cache, selection, scale=step.scale) for each in (step, own)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("cache_dtype", CODES)
def test_what_is_decoded_at_once_stays_within_the_workspace(
    cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(EagerBackend(PlainLinear()), [(1, 30)] * 24, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    limit = 6 * 16 * 2 * 32 * 4  # bytes of six pages' keys in float32
    monkeypatch.setattr(attention_plan, "WORKSPACE_BYTES", limit)
    sizes = note_decoded(monkeypatch, cache_dtype)
    step.run()
    slots = torch.from_numpy(step.block_tables[:, :1] * 16).int() + torch.arange(11)
    step.ops.selected_attention(
        step.q, step.kv_cache, Selection(slots.int(), torch.full((24,), 11)), scale=step.scale
    )  # fmt: skip
    assert limit / 2 < max(sizes) <= limit


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((4, 2), 64), ((8, 1), 96), ((6, 2), 128), ((2, 2), 40), ((2, 2), 112), ((3, 1), 48), ((8, 2), 80)],
)
def test_queries_in_bfloat16(ops: Backend, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """In place and packed: groups of a few and of many queries, heads that do not fill the registers."""
    step = Step(ops, MIXED, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, cache_dtype=dtype)
    step.q = step.q.bfloat16()
    torch.testing.assert_close(step.run().double(), step.expected(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_of_any_size_are_summed(ops: Backend, dtype: torch.dtype) -> None:
    """A query with one great number; a token of zeros, of small numbers, of great ones."""
    step = Step(ops, [(1, 1)], num_heads=2, num_kv_heads=1, head_dim=64, cache_dtype=dtype)
    step.q[0, :, 0] *= 1000
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-3, rtol=1e-3)
    for size in (0.0, 1e-20, 1e3):
        k, v = torch.ones(2, 1, 1, 64)
        slot = torch.from_numpy(step.block_tables[:1, 0]) * 16
        ops.write_kv(k * size, v * size, step.kv_cache, slot)
        torch.testing.assert_close(step.run(), torch.full_like(step.q, size), rtol=2e-3, atol=0)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", CODES)
def test_a_row_does_not_depend_on_its_company(ops: Backend, dtype: torch.dtype, source: torch.dtype) -> None:
    """Its context is long enough for several softmaxes, and for threads that divide its keys."""
    rows = [(1, 4500), (3, 40), (1, 4500), (70, 90)]
    together = Step(ops, rows, head_dim=32, num_heads=2, num_kv_heads=1, dtype=source, cache_dtype=dtype)
    out = together.run()
    first = 0
    for row, (query_len, _) in enumerate(rows):
        last = first + query_len
        batch = ops.attention_batch(
            together.query_lens[row : row + 1], together.seq_lens[row : row + 1],
            together.block_tables[row : row + 1], together.batch.slot_mapping[first:last], block_size=16,
        )  # fmt: skip
        alone = Step.__new__(Step)
        alone.__dict__ |= together.__dict__ | {"q": together.q[first:last], "batch": batch}
        torch.testing.assert_close(
            alone.run(),
            out[first:last],
            rtol=0,
            atol=0 if ops.__class__.__name__ != "EagerBackend" else 1e-5 if source == torch.float32 else 1e-2,
        )
        first = last
