"""Attention over pages against the formula, one token at a time."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.backend import AttentionForm, Backend
from quire.ops.cache_rows import LARGEST_CODE, decode, encode
from quire.ops.eager import attention_plan
from quire.ops.eager.attention_plan import VisibleRange
from quire.ops.eager.backend import EagerBackend
from quire.ops.latent import Selection

torch.set_num_threads(1)


GARBAGE = [0x7F, 0xFF, None]
"""Bytes of a page that served another kind of layer; None: any."""


def garbage_memory(shape: tuple[int, ...], dtype: torch.dtype, byte: int | None) -> Tensor:
    """Memory in which each byte has this value, or any; 0x46 is a number, or a scale, of 12,689."""
    num_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    if byte is not None:
        return torch.full(num_bytes, byte, dtype=torch.uint8).view(dtype)
    random = torch.Generator().manual_seed(7)
    return torch.randint(256, num_bytes, dtype=torch.uint8, generator=random).view(dtype)


class Step:
    """Random rows in a cache with shuffled pages; places that were not written hold garbage."""

    def __init__(
        self,
        ops: Backend,
        rows: list[tuple[int, int]],  # (query_len, seq_len)
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        given_back: int | None = None,
        page_gap: int = 0,
        cache_dtype: torch.dtype | None = None,
        prefix_spans: list[tuple[int, int]] | None = None,
        garbage: int | None = 0x46,
    ) -> None:
        """The cache has the dtype of keys and values, if no other is given.

        With `given_back`, a window, page 0 replaces the pages that no token of the step sees. Between pages lie
        `page_gap` numbers that belong to no page. The `garbage` is this byte; None: any bytes.
        """
        random = torch.Generator().manual_seed(seed)
        self.query_lens = np.array([query_len for query_len, _ in rows])
        self.seq_lens = np.array([seq_len for _, seq_len in rows])
        counts = -(-self.seq_lens // block_size)
        num_pages = int(counts.sum()) + 4
        order = (torch.randperm(num_pages - 1, generator=random) + 1).tolist()
        # The ids after a row's own pages do not exist.
        self.block_tables = np.full((len(rows), int(counts.max()) + 2), 10**6)
        cache_dtype = cache_dtype or dtype
        _, *page = ops.kv_cache_shape(num_pages, block_size, num_kv_heads, head_dim, cache_dtype)
        shape = (num_pages, math.prod(page) + page_gap)
        memory = garbage_memory(shape, cache_dtype, garbage)
        memory.view(torch.uint8)[0] = 0xFF  # NaN
        if cache_dtype not in LARGEST_CODE:
            memory[:, math.prod(page) :] = torch.nan
        self.between = memory[:, math.prod(page) :]
        self.kv_cache = memory[:, : math.prod(page)].unflatten(1, page)
        self.keys, self.values = [], []
        slots = []
        for row, (query_len, seq_len) in enumerate(rows):
            pages = np.array([order.pop() for _ in range(counts[row])])
            self.block_tables[row, : len(pages)] = pages
            if given_back is not None:
                self.block_tables[row, : max(0, seq_len - query_len - given_back + 1) // block_size] = 0
            k, v = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=random).to(dtype)
            positions = np.arange(seq_len)
            slot = torch.from_numpy(pages[positions // block_size] * block_size + positions % block_size)
            ops.write_kv(k, v, self.kv_cache, slot)
            slots.append(slot[seq_len - query_len :])
            self.keys.append(decode(encode(k, cache_dtype), dtype))
            self.values.append(decode(encode(v, cache_dtype), dtype))
        self.q = torch.randn(int(self.query_lens.sum()), num_heads, head_dim, generator=random).to(dtype)
        self.scale = head_dim**-0.5
        self.batch = ops.attention_batch(
            self.query_lens, self.seq_lens, self.block_tables, torch.cat(slots), block_size=block_size,
            prefix_spans=None if prefix_spans is None else np.array(prefix_spans),
        )  # fmt: skip
        self.prefix_spans = prefix_spans or [(0, 0)] * len(rows)
        self.ops = ops

    def run(self, window: int | None = None, **form: Any) -> Tensor:
        return self.ops.attention(self.q, self.kv_cache, self.batch, AttentionForm(self.scale, window, **form))

    def expected(self, window: int | None = None, **options: Any) -> Tensor:
        return self.expected_part(window, **options)[0]

    def expected_part(self, window: int | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """The outputs, and the logarithm of each softmax's denominator."""
        form = AttentionForm(self.scale, window, **options)
        results, sums = [], []
        rows = zip(self.seq_lens.tolist(), self.prefix_spans, self.keys, self.values, strict=True)
        for queries, (seq_len, (begin, end), k, v) in zip(
            self.q.double().split(self.query_lens.tolist()), rows, strict=True
        ):
            group = self.q.shape[1] // k.shape[1]
            keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
            position = torch.arange(seq_len - len(queries), seq_len).unsqueeze(1)
            key = torch.arange(seq_len)
            seen = key <= position  # [queries, keys]
            if window is not None:
                seen &= key > position - window
            in_span = (begin <= key) & (key < end) & (begin <= position) & (position < end)
            if form.span_window is not None:
                in_span &= (key - position).abs() < form.span_window
            seen |= in_span
            if form.chunk is not None:
                distance = position // form.chunk - key // form.chunk
                seen &= {"own": distance == 0, "previous": distance == 1, "earlier": distance > 1}[form.chunks]
            scores = torch.einsum("qhd,khd->qhk", queries, keys) * self.scale
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            if form.slopes is not None:
                scores += form.slopes.double().view(-1, 1) * (key - position).unsqueeze(1)
            if form.distance_bias is not None:
                reach = form.distance_bias.shape[1] // 2
                scores += form.distance_bias.double()[:, (key - position).clamp(-reach, reach) + reach].transpose(0, 1)
            scores.masked_fill_(~seen.unsqueeze(1), -torch.inf)
            total = scores.logsumexp(dim=-1)
            if form.sinks is not None:
                total = torch.logaddexp(total, form.sinks.double())
            results.append(torch.einsum("qhk,khd->qhd", (scores - total.unsqueeze(-1)).exp(), values))
            sums.append(total)
        return torch.cat(results).view(self.q.shape), torch.cat(sums)


MIXED = [(1, 1), (1, 37), (5, 5), (1, 130), (7, 40), (23, 23), (1, 17), (6, 41), (1, 16), (24, 24), (33, 70), (1, 300)]


@pytest.mark.parametrize(("window", "span_window"), [(None, None), (1, None), (25, None), (25, 25), (None, 9), (40, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_of_a_prefix_span_see_each_other(
    ops: Backend, has_bias: bool, window: int | None, span_window: int | None
) -> None:
    """Whole spans, with tokens around them and without; later parts of such sequences; and rows without a span.

    A window hides nothing of a span from its own tokens, unless it is the span's.
    """
    rows = [
        (20, 20),
        (300, 300),
        (45, 45),
        (1, 60),
        (9, 70),
        (1, 1),
        (7, 30),
        (150, 150),
        (200, 230),
        (40, 40),
        (1, 50),
    ]
    spans = [(0, 20), (0, 300), (0, 30), (0, 40), (0, 61), (0, 1), (0, 0), (0, 20), (60, 210), (30, 40), (3, 50)]
    step = Step(ops, rows, num_heads=6, prefix_spans=spans)
    bias = torch.randn(6, 2 * 50 + 1, generator=torch.Generator().manual_seed(3)) if has_bias else None
    form = AttentionForm(step.scale, window, distance_bias=bias, span_window=span_window)
    out, lse = ops.partial_attention(step.q, step.kv_cache, step.batch, form)
    expected, expected_lse = step.expected_part(window, distance_bias=bias, span_window=span_window)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step.run(window, distance_bias=bias, span_window=span_window), out)


def test_a_prefix_span_has_no_chunks(ops: Backend) -> None:
    step = Step(ops, [(20, 20)], prefix_spans=[(5, 9)])
    with pytest.raises(ValueError, match="prefix span"):
        step.run(chunk=16)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_denominators_of_a_part(ops: Backend, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    """Also of many keys, which threads divide, and of rows of one key."""
    step = Step(ops, [(1, 1), (3, 40), (1, 2500), (70, 90), (1, 17)], dtype=dtype, cache_dtype=cache_dtype)
    tolerance = 1e-4 if dtype == torch.float32 and cache_dtype is None else 5e-2
    whole = step.run()
    for chunk in (7, 64, 70, 2100, 4000):
        parts = []
        for chunks in ("own", "previous", "earlier"):
            form = AttentionForm(step.scale, chunk=chunk, chunks=chunks)
            out, lse = ops.partial_attention(step.q, step.kv_cache, step.batch, form)
            expected, expected_lse = step.expected_part(chunk=chunk, chunks=chunks)
            torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=0)
            seen = expected_lse.isfinite()
            torch.testing.assert_close(out.double()[seen], expected[seen], atol=tolerance, rtol=tolerance)
            if isinstance(ops, EagerBackend):  # whose products may reach past a row's end
                assert out.isfinite().all()
            if chunks == "own":
                assert torch.equal(out, step.run(chunk=chunk))
            parts.append((out, lse))
        merged = ops.merge_attention(parts)
        assert merged.dtype == dtype
        torch.testing.assert_close(merged, whole, atol=tolerance, rtol=tolerance)
    assert torch.equal(merged, whole), "a part alone has all of the softmax"
    heads = [(out[:, 1:3], lse[:, 1:3]) for out, lse in parts]  # not dense
    assert torch.equal(ops.merge_attention(heads), merged[:, 1:3])


@pytest.mark.parametrize("window", [None, 1, 7, 16, 33, 1000])
def test_mixed_batch(ops: Backend, window: int | None) -> None:
    step = Step(ops, MIXED)
    torch.testing.assert_close(step.run(window).double(), step.expected(window), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 64, 16), (6, 2, 40, 8), (7, 1, 96, 1), (8, 8, 128, 32), (4, 2, 256, 5), (3, 3, 80, 128)],
)
def test_heads_and_block_sizes(ops: Backend, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    step = Step(
        ops, MIXED[:8], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )
    for window in (None, 20):
        torch.testing.assert_close(step.run(window).double(), step.expected(window), atol=2e-5, rtol=1e-4)


FORMS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "wide softcap": {"softcap": 50.0},
    "sinks": {"sinks": torch.tensor([0.5, -30.0, 60.0, 2.0])},
    "no sinks": {"sinks": torch.full((4,), -torch.inf)},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.01, 0.0])},
    "distance bias": {"distance_bias": torch.randn(4, 2 * 9 + 1, generator=torch.Generator().manual_seed(3))},
    "far distance bias": {"distance_bias": torch.randn(4, 2 * 800 + 1, generator=torch.Generator().manual_seed(4))},
    "small chunks": {"chunk": 7},
    "large chunks": {"chunk": 100},
    "chunks and window": {"chunk": 64, "window": 20},
    "all": {
        "chunk": 90, "softcap": 2.0, "sinks": torch.tensor([0.5, -3.0, 6.0, 2.0]),
        "slopes": torch.tensor([0.5, 0.25, 0.01, 0.0]),
        "distance_bias": torch.randn(4, 2 * 30 + 1, generator=torch.Generator().manual_seed(5)),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(ops: Backend, form: str) -> None:
    step = Step(ops, [*MIXED, (1, 2500), (40, 2080)])
    torch.testing.assert_close(
        step.run(**FORMS[form]).double(), step.expected(**FORMS[form]), atol=2e-5, rtol=1e-4
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forms_in_half_precision(ops: Backend, dtype: torch.dtype) -> None:
    step = Step(ops, MIXED, dtype=dtype)
    torch.testing.assert_close(step.run(**FORMS["all"]).double(), step.expected(**FORMS["all"]), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 17, 72, 112, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_head_dim(ops: Backend, head_dim: int, dtype: torch.dtype) -> None:
    step = Step(ops, [(1, 1), (1, 70), (20, 90), (65, 65)], head_dim=head_dim, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(step.run().double(), step.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cache_dtype", [None, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("workspace", [attention_plan.WORKSPACE_BYTES, 5000])
def test_attention_to_selected_tokens(
    own_native: Backend, workspace: int, cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest tokens and themselves: a window."""
    monkeypatch.setattr(attention_plan, "WORKSPACE_BYTES", workspace)
    step, window = Step(own_native, [(5, 40), (1, 3), (20, 20)], cache_dtype=cache_dtype, page_gap=64), 7
    rows = zip(step.query_lens, step.seq_lens, step.block_tables, strict=True)
    places = [(torch.arange(stop - count, stop), torch.from_numpy(table)) for count, stop, table in rows]
    slots = []
    for own, table in places:
        seen = ((own - window + 1).clamp(min=0).unsqueeze(1) + torch.arange(window)).minimum(own.unsqueeze(1))
        slots.append(table[seen // 16] * 16 + seen % 16)
    counts = torch.cat([own for own, _ in places]).add(1).clamp(max=window)
    selection = Selection(torch.cat(slots).int(), counts)
    got = own_native.selected_attention(step.q, step.kv_cache, selection, scale=step.scale)
    torch.testing.assert_close(got.double(), step.expected(window), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [1, 512])
def test_pages_may_lie_apart(ops: Backend, dtype: torch.dtype, gap: int) -> None:
    dense, apart = (Step(ops, MIXED, dtype=dtype, page_gap=size) for size in (0, gap))
    assert not apart.kv_cache.is_contiguous()
    torch.testing.assert_close(apart.kv_cache, dense.kv_cache, atol=0, rtol=0, equal_nan=True)
    assert apart.between.isnan().all()
    for window in (None, 9):
        torch.testing.assert_close(apart.run(window), dense.run(window), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(ops: Backend, dtype: torch.dtype) -> None:
    step = Step(ops, MIXED, dtype=dtype)
    assert step.run().dtype == dtype
    for window in (None, 9):
        torch.testing.assert_close(step.run(window).double(), step.expected(window), atol=3e-2, rtol=3e-2)


def test_layers_with_different_windows_share_a_batch(ops: Backend) -> None:
    step = Step(ops, MIXED)
    for window in (None, 8, None, 24, 8):
        torch.testing.assert_close(step.run(window).double(), step.expected(window), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [1, 8, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_before_the_window_are_not_read(ops: Backend, dtype: torch.dtype, window: int, block_size: int) -> None:
    """Such pages may have been given back: page 0, which is full of NaN, replaces them."""
    rows = [*MIXED, (1, 5000), (60, 3000)]
    whole, rest = (Step(ops, rows, block_size=block_size, dtype=dtype, given_back=back) for back in (None, window))
    assert (rest.block_tables == 0).any()
    torch.testing.assert_close(rest.run(window), whole.run(window), atol=0, rtol=0)
    assert rest.run(window).isfinite().all()


def test_long_prompts_are_cut_and_groups_stay_within_the_workspace(
    ops: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "MAX_QUERY_LEN", 16)
    monkeypatch.setattr(attention_plan, "WORKSPACE_BYTES", 6 * 16 * 2 * 32 * 4)  # six pages
    monkeypatch.setattr(attention_plan, "MAX_KEPT_BIAS", 3000)
    monkeypatch.setattr(attention_plan, "MAX_KEPT_BIASES", 7000)
    monkeypatch.setattr(attention_plan, "MAX_SCORES", 9000)
    step = Step(ops, [(50, 50), (33, 90), *[(1, 40)] * 5, (90, 91), *[(3, 8)] * 4, (1, 400)])
    for window in (None, 30):
        torch.testing.assert_close(step.run(window).double(), step.expected(window), atol=2e-5, rtol=1e-4)
        for group in step.batch.groups(VisibleRange(window, None), 4, 16 * 2 * 32 * 4):  # type: ignore[attr-defined]
            assert group.query_len <= 16
            assert group.num_rows == 1 or len(group.pages) <= 6
    visible_ranges = [VisibleRange(window, None) for window in (None, 30)]
    groups = [each for visible in visible_ranges for each in step.batch.groups(visible, 4, 16 * 2 * 32 * 4)]  # type: ignore[attr-defined]
    kept = [group for group in groups if group.keeps_bias and not group.sees_all]
    assert 3000 < sum(group.num_rows * group.query_len * group.key_len for group in kept) <= 7000


def test_decode_rows_of_similar_length_form_one_group(ops: Backend) -> None:
    step = Step(ops, [(1, 120 + row) for row in range(32)], num_heads=2, num_kv_heads=1, head_dim=32)
    step.run()
    assert len(step.batch.groups(VisibleRange(None, None), 2, 16 * 32 * 4)) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("query_len", [1, 4])
def test_what_another_request_left_behind_does_no_harm(ops: Backend, query_len: int) -> None:
    """A page's unused slots may hold values of an earlier request with broken activations."""
    step = Step(ops, [(query_len, 21), (query_len, 40)])
    poison = torch.full((1, 2, 32), float("nan"))
    last_page = int(step.block_tables[0, 1])
    for offset, value in ((5, float("nan")), (9, float("inf")), (15, float("-inf"))):
        poison.fill_(value)
        step.ops.write_kv(poison, poison, step.kv_cache, torch.tensor([last_page * 16 + offset]))
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-5, rtol=1e-4)


def test_a_cache_of_another_dtype(ops: Backend) -> None:
    step = Step(ops, MIXED)
    step.kv_cache = step.kv_cache.to(torch.bfloat16)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=3e-2, rtol=3e-2)
