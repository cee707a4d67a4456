"""Rotation, cache and decode attention in one kernel: the bits of the two kernels, and the numbers of plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.backend import AttentionForm, DeviceRows, NewHeads
from quire.ops.triton.attention import Attention
from quire.ops.triton.backend import TritonBackend
from tests.ops.test_attention import Step
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.paged import EAGER, SLOPES

TRITON = TritonBackend()
LENGTHS = [37, 300, 1]
SHAPES: list[dict[str, Any]] = [
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80, "block_size": 8},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "dtype": torch.bfloat16, "page_gap": 16},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 512, "dtype": torch.float16},
    {"num_heads": 17, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float16, "block_size": 32},
]


class Decode:
    """The new tokens of a decode step, in the projection of queries, keys and values, and their rotation."""

    def __init__(self, lengths: list[int] = LENGTHS, *, has_norm: bool = True, **shape: Any) -> None:
        self.step = Step(EAGER, [(1, length) for length in lengths], **shape)
        random = torch.Generator().manual_seed(1)
        num_heads, num_kv_heads = self.step.q.shape[1], self.step.kv_cache.shape[2]
        dtype, head_dim = self.step.q.dtype, self.step.q.shape[2]
        heads = torch.randn(len(lengths), num_heads + 2 * num_kv_heads, head_dim, generator=random)
        self.heads = heads.to(DEVICE, dtype)
        frequencies = torch.logspace(0, -3, head_dim // 2, device=DEVICE)
        positions = torch.tensor([length - 1 for length in lengths], device=DEVICE)
        self.turns = EAGER.rotation(positions, frequencies, 1.0, dtype)
        weight = torch.rand(num_heads + num_kv_heads, head_dim, generator=random) + 0.5
        self.norm = (weight.to(DEVICE, dtype), 1e-6) if has_norm else None

    def run(
        self, ops: Any, form: AttentionForm, *, is_one: bool, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The outputs, and the cache after the step."""
        cache, plan = self.step.kv_cache.to(DEVICE).clone(), self.step.batch
        batch = ops.attention_batch(
            plan.query_lens, plan.seq_lens, plan.block_tables, plan.slot_mapping.to(DEVICE), block_size=plan.block_size
        )
        new = NewHeads(self.heads, *self.turns, cache, batch.slot_mapping, norm=self.norm, scales=scales)
        if is_one:
            return ops.rotate_and_attend(new, batch, form), cache
        q = ops.rotate_and_store(new)
        return ops.attention(q, cache, batch, form), cache


@pytest.fixture(autouse=True)
def is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each launch of the one kernel."""
    launched: list[str] = []
    original = Attention.rotate_and_attend

    def count(self: Attention, *arguments: Any) -> Tensor:
        launched.append("one")
        return original(self, *arguments)

    monkeypatch.setattr(Attention, "rotate_and_attend", count)
    return launched


def assert_same(decode: Decode, form: AttentionForm, launched: list[str], scales: Tensor | None = None) -> None:
    one, stored = decode.run(TRITON, form, is_one=True, scales=scales)
    assert launched == ["one"]
    two, kept = decode.run(TRITON, form, is_one=False, scales=scales)
    assert launched == ["one"]
    assert torch.equal(one, two)
    assert torch.equal(stored.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_kernel_has_the_bits_of_two(shape: dict[str, Any], is_one_kernel: list[str], has_norm: bool) -> None:
    decode = Decode(has_norm=has_norm, **shape)
    assert_same(decode, AttentionForm(decode.step.scale), is_one_kernel)


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_caches(cache_dtype: torch.dtype, is_one_kernel: list[str], has_scales: bool) -> None:
    decode = Decode([150, 3], num_heads=3, num_kv_heads=1, head_dim=40, cache_dtype=cache_dtype)
    scales = torch.tensor([[0.01], [0.02]], device=DEVICE) if has_scales else None
    assert_same(decode, AttentionForm(decode.step.scale), is_one_kernel, scales)


@pytest.mark.parametrize(
    "form", [{"window": 20}, {"chunk": 16}, {"softcap": 3.0}, {"slopes": SLOPES}, {"sinks": SLOPES}], ids=str
)
def test_forms(form: dict[str, Any], is_one_kernel: list[str]) -> None:
    decode = Decode()
    there = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in form.items()}
    assert_same(decode, AttentionForm(decode.step.scale, **there), is_one_kernel)


def test_it_computes_what_plain_torch_does() -> None:
    decode = Decode()
    form = AttentionForm(decode.step.scale)
    (got, stored), (out, kept) = decode.run(TRITON, form, is_one=True), decode.run(EAGER, form, is_one=True)
    torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-5)
    slots = decode.step.batch.slot_mapping.to(DEVICE)
    torch.testing.assert_close(EAGER.read_kv(stored, slots), EAGER.read_kv(kept, slots), rtol=1e-5, atol=1e-5)


def test_padding_is_not_stored(is_one_kernel: list[str]) -> None:
    decode = Decode()
    slots = decode.step.batch.slot_mapping
    slots[1] = -1
    before = decode.step.kv_cache.clone()
    _, after = decode.run(TRITON, AttentionForm(decode.step.scale), is_one=True)
    assert is_one_kernel
    changed = (after.view(torch.uint8) != before.to(DEVICE).view(torch.uint8)).flatten(1).any(1)
    assert {*changed.nonzero().flatten().tolist()} == {
        int(slot) // decode.step.batch.block_size for slot in slots if slot >= 0
    }


def test_rows_see_the_keys_of_others_that_share_their_pages(is_one_kernel: list[str]) -> None:
    """As drafts do: the kernel of both would read some before they are stored."""
    decode = Decode([300, 301, 17])
    plan, size = decode.step.batch, decode.step.batch.block_size
    plan.block_tables[0] = plan.block_tables[1]
    plan.slot_mapping[0] = int(plan.block_tables[1, 299 // size]) * size + 299 % size
    starts, lens, tables = (
        torch.from_numpy(np.asarray(each, np.int32)).to(DEVICE) for each in (range(4), plan.seq_lens, plan.block_tables)
    )
    there = DeviceRows(starts, lens, tables, 1, 301, are_apart=False)
    form, outs = AttentionForm(decode.step.scale), []
    for ops in (TRITON, EAGER):
        cache = decode.step.kv_cache.to(DEVICE).clone()
        batch = ops.attention_batch(
            plan.query_lens, plan.seq_lens, plan.block_tables, plan.slot_mapping.to(DEVICE), block_size=size,
            there=there,
        )  # fmt: skip
        new = NewHeads(decode.heads, *decode.turns, cache, batch.slot_mapping, norm=decode.norm)
        outs.append(ops.rotate_and_attend(new, batch, form))
    assert is_one_kernel == []
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("broken", ["rotate_and_store", "attention", "rotate_and_attend"])
def test_what_does_not_work_is_not_part_of_it(broken: str, is_one_kernel: list[str]) -> None:
    decode, form = Decode(), AttentionForm(0.2)
    ops = TritonBackend([broken])
    out, _ = decode.run(ops, form, is_one=True)
    assert is_one_kernel == []
    torch.testing.assert_close(out, decode.run(EAGER, form, is_one=True)[0], rtol=1e-5, atol=1e-5)


def test_prompts_and_prefixes_go_the_ordinary_way(is_one_kernel: list[str]) -> None:
    decode = Decode()
    plan, form, cache = decode.step.batch, AttentionForm(decode.step.scale), decode.step.kv_cache.to(DEVICE)
    batch = TRITON.attention_batch(
        plan.query_lens, plan.seq_lens, plan.block_tables, plan.slot_mapping.to(DEVICE), block_size=plan.block_size,
        prefix_spans=np.stack((np.zeros_like(plan.seq_lens), plan.seq_lens), axis=1),
    )  # fmt: skip
    TRITON.rotate_and_attend(NewHeads(decode.heads, *decode.turns, cache, batch.slot_mapping), batch, form)
    assert is_one_kernel == []
