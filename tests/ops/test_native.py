"""The C++ kernels against the formulas, beyond the shared tests: dtypes, odd shapes, threads, neighbouring rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.backend import AttentionForm, NewHeads
from quire.ops.cpu.libraries import load_kernels
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.onednn import OneDnnLinear, OneDnnWeight
from quire.ops.eager.backend import EagerBackend
from tests.ops.levels import Level
from tests.ops.test_attention import MIXED, Step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_way_back(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables plain torch, so that only the kernels can pass these tests."""
    if "falls_back" in request.node.name:
        return

    def refuse(self: EagerBackend, *args: object, **kwargs: object) -> None:
        raise AssertionError("plain torch was asked")

    for name in ("attention", "rms_norm", "add_rms_norm", "rotary", "activate_and_mul", "write_kv", "rotate_and_store"):
        monkeypatch.setattr(EagerBackend, name, refuse)


@pytest.fixture(autouse=True)
def no_type_that_the_build_lacks(request: pytest.FixtureRequest) -> None:
    parameters = request.node.callspec.params
    level: Level = parameters["native"]
    if torch.float16 in parameters.values() and not level.has_float16:
        pytest.skip("this build leaves float16 to torch")


def assert_near(step: Step, window: int | None, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(step.run(window).double(), step.expected(window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_any_two_types(native: NativeBackend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    step = Step(native, MIXED, dtype=dtype)
    step.kv_cache = step.kv_cache.to(cache_dtype)
    for window in (None, 40):
        assert_near(step, window, dtype if dtype == cache_dtype else torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 1, 1), (3, 1, 33, 3), (64, 1, 16, 16), (14, 2, 72, 7), (16, 8, 128, 16), (2, 2, 256, 64), (5, 5, 100, 65)],
)
def test_odd_shapes(
    native: NativeBackend, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    rows = [(1, 1), (1, 63), (1, 64), (1, 65), (3, 66), (70, 70), (35, 140), (1, 200)]
    step = Step(
        native, rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip
    for window in (None, 1, 64, 65):
        assert_near(step, window, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_whose_keys_lie_as_if_they_were_neighbours(native: NativeBackend, dtype: torch.dtype) -> None:
    """With one KV head and pages of 7 tokens, key 15 can be 15 rows after key 0, with another page's keys between."""
    for seed in range(40):
        rows = [(1, 20), (20, 20)]
        step = Step(native, rows, num_heads=2, num_kv_heads=1, head_dim=32, block_size=7, dtype=dtype, seed=seed)
        assert_near(step, None, dtype)


def take(step: Step, row: int, first: int, last: int, native: NativeBackend, window: int | None, **form: Any) -> Tensor:
    """New tokens [first, last) of one row of a step, computed as a step of their own."""
    start = int(step.query_lens[:row].sum())
    computed = step.seq_lens[row] - step.query_lens[row]
    batch = native.attention_batch(
        np.array([last - first]), np.array([computed + last]), step.block_tables[row : row + 1],
        torch.empty(0, dtype=torch.int64), block_size=16,
    )  # fmt: skip
    queries = step.q[start + first : start + last]
    return native.attention(queries, step.kv_cache, batch, AttentionForm(step.scale, window, **form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("num_heads", "head_dim"),
    [(4, 32), (4, 40), (4, 128), (14, 64), (16, 32)],  # a decode step reads keys and values in place, but not with 40
)
def test_bits_depend_neither_on_the_batch_nor_on_chunks(
    native: NativeBackend, two_threads: None, dtype: torch.dtype, window: int | None, num_heads: int, head_dim: int
) -> None:
    rows = [(1, 90), (150, 150), (1, 7), (40, 260), (1, 300)]
    step = Step(native, rows, dtype=dtype, num_heads=num_heads, head_dim=head_dim)
    together = step.run(window)
    assert torch.equal(take(step, 0, 0, 1, native, window), together[:1])
    assert torch.equal(take(step, 3, 0, 40, native, window), together[152:192])
    chunks = [
        take(step, 1, first, last, native, window) for first, last in ((0, 13), (13, 100), (100, 101), (101, 150))
    ]
    assert torch.equal(torch.cat(chunks), together[1:151])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 40])
def test_prefix_spans_whose_tokens_see_each_other(native: NativeBackend, dtype: torch.dtype, head_dim: int) -> None:
    """Short and long ones, in several items and tiles; a token alone gives the same bits."""
    rows, spans = [(3, 3), (200, 200), (2, 70), (90, 130)], [(0, 3), (0, 190), (0, 60), (50, 128)]
    step = Step(native, rows, num_heads=6, head_dim=head_dim, dtype=dtype, prefix_spans=spans)
    bias = torch.randn(6, 2 * 20 + 1, generator=torch.Generator().manual_seed(3))
    out = step.run(distance_bias=bias)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), step.expected(distance_bias=bias), atol=tolerance, rtol=tolerance)
    for token in (0, 188, 189, 190):
        alone = native.attention_batch(
            np.array([1]), np.array([token + 1]), step.block_tables[1:2], torch.empty(0, dtype=torch.int64),
            block_size=16, prefix_spans=np.array([[0, 190]]),
        )  # fmt: skip
        q = step.q[3 + token : 4 + token]
        got = native.attention(q, step.kv_cache, alone, AttentionForm(step.scale, distance_bias=bias))
        assert torch.equal(got[0], out[3 + token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 40])
def test_bits_of_all_forms_depend_neither_on_the_batch_nor_on_chunks(
    native: NativeBackend, two_threads: None, dtype: torch.dtype, head_dim: int
) -> None:
    form: dict[str, Any] = {
        "chunk": 100, "softcap": 3.0, "sinks": torch.tensor([0.5, -2.0, 8.0, 1.0]), "slopes": torch.rand(4),
        "distance_bias": torch.randn(4, 2 * 50 + 1),
    }  # fmt: skip
    step = Step(native, [(1, 90), (150, 150), (40, 5000)], dtype=dtype, head_dim=head_dim)
    together = step.run(**form)
    assert torch.equal(take(step, 0, 0, 1, native, None, **form), together[:1])
    parts = [take(step, 1, first, last, native, None, **form) for first, last in ((0, 99), (99, 101), (101, 150))]
    assert torch.equal(torch.cat(parts), together[1:151])
    assert torch.equal(take(step, 2, 7, 8, native, None, **form), together[158:159])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5000])
def test_long_contexts_are_summed_alike_however_they_are_shared_out(
    native: NativeBackend, two_threads: None, dtype: torch.dtype, window: int | None
) -> None:
    """A softmax starts again every 2,048 keys. Items across such a border, and threads that share it, must agree."""
    step = Step(native, [(1, 9000), (40, 8210), (1, 90), (1, 2049)], dtype=dtype)
    together = step.run(window)
    assert_near(step, window, dtype)
    last = int(step.query_lens[:2].sum())
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(step.run(window), together)
        assert torch.equal(take(step, 0, 0, 1, native, window), together[:1])
        assert torch.equal(take(step, 3, 0, 1, native, window), together[-1:])
        chunks = [take(step, 1, first, end, native, window) for first, end in ((0, 17), (17, 18), (18, 19), (19, 40))]
        assert torch.equal(torch.cat(chunks), together[1:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_row_shows_and_leaves_the_others_alone(native: NativeBackend, dtype: torch.dtype) -> None:
    step = Step(native, [(1, 30), (2, 40), (1, 50)], dtype=dtype)
    healthy = step.run()
    step.q[1:3] = float("nan")
    broken = step.run()
    assert broken[1:3].isnan().all()
    assert torch.equal(broken[[0, 3]], healthy[[0, 3]])


def test_a_broken_key_shows_from_any_part_of_a_long_context(native: NativeBackend) -> None:
    for position in (0, 3000, 8999):
        step = Step(native, [(1, 9000)])
        block = step.block_tables[0, position // 16]
        step.kv_cache[block, 0, :, position % 16] = float("nan")
        assert step.run().isnan().all()


def test_pages_before_the_window_are_not_read(native: NativeBackend) -> None:
    step = Step(native, [(1, 200), (5, 300)])
    expected = step.run(window=20)
    for row, first in ((0, 180), (1, 276)):
        step.block_tables[row, : first // 16] = 10**6  # given away
    step.batch = native.attention_batch(
        step.query_lens, step.seq_lens, step.block_tables, step.batch.slot_mapping, block_size=16
    )
    assert torch.equal(step.run(window=20), expected)


def test_attention_with_too_many_heads_of_a_group_falls_back(native: NativeBackend) -> None:
    assert_near(Step(native, MIXED[:4], num_heads=65, num_kv_heads=1, head_dim=8), None, torch.float32)


def test_a_type_without_a_kernel_falls_back(native: NativeBackend) -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    norm = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    # Our kernel computes in float32 for every dtype, so it is off by a few units of 1.2e-7.
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), norm, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(native.activate_and_mul(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


def test_large_inputs_use_all_threads_alike(native: NativeBackend, two_threads: None) -> None:
    x, residual, weight = torch.randn(300, 200), torch.randn(300, 200), torch.randn(200)
    rms = torch.nn.functional.rms_norm
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), rms(x, (200,), weight, 1e-6))
    out, total = native.add_rms_norm(x, residual.clone(), weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, rms(x + residual, (200,), weight, 1e-6))
    torch.testing.assert_close(native.activate_and_mul(x), torch.nn.functional.silu(x[:, :100]) * x[:, 100:])


def test_activations_of_extremes(native: NativeBackend) -> None:
    gate = torch.tensor([[-1e10, -200.0, -88.0, -9.0, 0.0, 1e-20, 200.0, 1e30, float("nan")]])
    both = torch.cat((gate, torch.ones_like(gate)), dim=1)
    silu, gelu = torch.nn.functional.silu(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(native.activate_and_mul(both), silu, equal_nan=True, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(native.activate_and_mul(both, "gelu_tanh"), gelu, equal_nan=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_write_kv(native: NativeBackend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    heads = torch.randn(9, 5, 24).to(dtype)
    k, v = heads[:, :2], heads[:, 3:]  # views, as they come out of one projection
    k[0, 0, 0], k[0, 0, 1], v[1, 1, 2] = float("nan"), float("inf"), float("-inf")
    cache = torch.zeros(native.kv_cache_shape(3, 4, 2, 24, cache_dtype), dtype=cache_dtype)
    slots = torch.tensor([11, 3, 4, 0, 7, 8, 1, 10, 5])
    native.write_kv(k, v, cache, slots)
    flat = cache.permute(1, 2, 0, 3, 4).flatten(2, 3)
    largest = min(1e18, torch.finfo(cache_dtype).max)
    for stored, new in zip(flat, (k, v), strict=True):
        expected = new.transpose(0, 1).float().nan_to_num(0.0, largest, -largest).clamp(-largest, largest)
        assert torch.equal(stored[:, slots], expected.to(cache_dtype))
        assert not stored[:, [2, 6, 9]].any()


class CountedLinear(OneDnnLinear):
    """Notes the number of threads for each product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def multiply(self, x: Tensor, packed: OneDnnWeight) -> Tensor:
        self.seen.append(torch.get_num_threads())
        return super().multiply(x, packed)


def test_an_operation_too_small_for_threads_stays_on_one(native: NativeBackend, two_threads: None) -> None:
    """Checked by oneDNN's number of threads, which is restored afterwards."""
    linear_layers, kernels = CountedLinear(), load_kernels()
    assert kernels is not None
    native = NativeBackend(kernels, EagerBackend(linear_layers))
    native._quantized.is_fast = False  # as on a processor without AVX2
    weight = native.pack_linear(torch.randn(2048, 1024))
    for num_tokens in (1, 1, 512):
        native.linear(torch.randn(num_tokens, 1024), native.pack_linear(torch.randn(16, 1024)))
        native.linear(torch.randn(num_tokens, 1024), weight)
    assert linear_layers.seen == [1, 2, 1, 2, 1, 2]
    assert torch.get_num_threads() == 2
    x = torch.randn(1024, 1024)
    assert torch.equal(native.linear(x, weight)[:1], native.linear(x[:1].contiguous(), weight))


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_rotate_and_store_keeps_the_cache_finite(native: NativeBackend, cache_dtype: torch.dtype) -> None:
    heads = torch.randn(2, 4, 16)  # 2 query heads, a key, a value
    heads[0, 2], heads[0, 3, :2] = float("nan"), torch.tensor([float("inf"), float("-inf")])
    cos, sin = torch.ones(2, 1, 16), torch.zeros(2, 1, 16)
    cache = torch.zeros(native.kv_cache_shape(1, 2, 1, 16, cache_dtype), dtype=cache_dtype)
    q = native.rotate_and_store(NewHeads(heads, cos, sin, cache, torch.tensor([0, 1])))
    assert torch.equal(q, heads[:, :2])
    largest = min(1e18, torch.finfo(cache_dtype).max)
    expected = heads[:, 2:].nan_to_num(0.0, largest, -largest).to(cache_dtype)
    assert torch.equal(cache[0, :, 0].transpose(0, 1), expected)
