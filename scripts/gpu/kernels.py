"""Times operations of dense models on an accelerator, in a graph, beside their floors and plain torch."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from part_results import Results
from timing import microseconds_in_graph, num_copies
from torch import Tensor

from quire import ops
from quire.ops.backend import AttentionForm, Backend
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear

BF16 = torch.bfloat16
ROWS = (1, 16, 64, 128)

WEIGHTS = {  # [out, in] of linear layers
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B down": (1024, 3072),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B down": (4096, 12288),
    "head": (151936, 1024),
}
GATED = {"0.6B gate_up": (6144, 1024), "8B gate_up": (24576, 4096)}


class Case(NamedTuple):
    """One operation. `make(ops)` returns calls with different operands; each moves `nbytes` and computes `flops`."""

    kernel: str
    name: str
    nbytes: int
    make: Callable[[Backend], Sequence[Callable[[], object]]]
    flops: int = 0


def main() -> None:
    """Times every case; one that fails is reported and left."""
    results = Results.of_part()
    ceilings = next((row["ceilings"] for row in results.read() if "ceilings" in row), {})
    bytes_per_us = ceilings.get("copy_gb_s", 3030) * 1e3
    flops_per_us = ceilings.get("bf16_tflop_s", 758) * 1e6
    own, eager = ops.bind("cuda"), EagerBackend(PlainLinear())
    with torch.inference_mode():
        for case in cases():
            figures: dict[str, Any] = {}
            for name, backend in (("us", own), ("eager_us", eager)):
                try:
                    figures[name] = microseconds_in_graph(case.make(backend))
                except Exception as error:
                    traceback.print_exc()
                    figures[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
                torch.cuda.empty_cache()
            floor = max(case.nbytes / bytes_per_us, case.flops / flops_per_us)
            if "us" in figures:
                results.add(kernel=case.kernel, case=case.name, floor_us=floor, **figures)
            else:
                results.add(failed=case.kernel, case=case.name, **figures)


def cases() -> Iterator[Case]:
    for name, (out, size) in WEIGHTS.items():
        for rows in ROWS:
            yield _linear("linear", name, out, size, rows)
    for name, (out, size) in GATED.items():
        for rows in ROWS:
            yield _linear("gated_linear", name, out, size, rows)
    for rows, size in ((1, 1024), (256, 1024), (64, 4096)):
        yield _norm(rows, size)
    for num_seqs, length, heads in ((1, 1024, 16), (64, 4096, 32), (256, 1024, 32), (1, 32768, 32)):
        yield _decode(num_seqs, length, heads)
    yield _prefill(8192, 32)
    for rows in (1, 128):
        yield _sampling("likeliest", rows)
        yield _sampling("draw", rows)


def _linear(kernel: str, name: str, out: int, size: int, rows: int) -> Case:
    def make(ops: Backend) -> list[Callable[[], object]]:
        x = torch.randn(rows, size, device="cuda", dtype=BF16)
        weights = [
            torch.randn(out, size, device="cuda", dtype=BF16) * size**-0.5 for _ in range(num_copies(2 * out * size))
        ]
        if kernel == "linear":
            return [lambda packed=ops.pack_linear(weight): ops.linear(x, packed) for weight in weights]
        return [lambda packed=ops.pack_gated_linear(weight): ops.gated_linear(x, packed) for weight in weights]

    nbytes = 2 * (out * size + rows * (size + out))
    return Case(kernel, f"{name} {rows}", nbytes, make, 2 * rows * out * size)


def _norm(rows: int, size: int) -> Case:
    def make(ops: Backend) -> list[Callable[[], object]]:
        weight = torch.rand(size, device="cuda", dtype=BF16)
        pairs = [torch.randn(2, rows, size, device="cuda", dtype=BF16).unbind() for _ in range(16)]
        return [lambda x=x, residual=residual: ops.add_rms_norm(x, residual, weight, 1e-6) for x, residual in pairs]

    return Case("add_rms_norm", f"{rows} x {size}", 8 * rows * size, make)


def _decode(num_seqs: int, length: int, heads: int, kv_heads: int = 8, head_dim: int = 128) -> Case:
    kv_bytes = 4 * num_seqs * length * kv_heads * head_dim

    def make(ops: Backend) -> list[Callable[[], object]]:
        form = AttentionForm(head_dim**-0.5)
        q = torch.randn(num_seqs, heads, head_dim, device="cuda", dtype=BF16)
        batch = paged_batch(ops, [1] * num_seqs, [length] * num_seqs)
        caches = [_cache(ops, num_seqs * length // 16, kv_heads, head_dim) for _ in range(min(num_copies(kv_bytes), 8))]
        return [lambda cache=cache: ops.attention(q, cache, batch, form) for cache in caches]

    return Case("attention", f"decode {num_seqs} x {length}, {heads}/{kv_heads} heads", kv_bytes, make)


def _prefill(length: int, heads: int, kv_heads: int = 8, head_dim: int = 128) -> Case:
    def make(ops: Backend) -> list[Callable[[], object]]:
        form = AttentionForm(head_dim**-0.5)
        q = torch.randn(length, heads, head_dim, device="cuda", dtype=BF16)
        batch = paged_batch(ops, [length], [length])
        cache = _cache(ops, length // 16, kv_heads, head_dim)
        return [lambda: ops.attention(q, cache, batch, form)]

    return Case("attention", f"prompt {length}, {heads}/{kv_heads} heads", 0, make, 2 * length**2 * heads * head_dim)


def _sampling(kernel: str, rows: int, vocab_size: int = 131072) -> Case:
    def make(ops: Backend) -> list[Callable[[], object]]:
        logits = [torch.randn(rows, vocab_size, device="cuda") for _ in range(num_copies(4 * rows * vocab_size))]
        if kernel == "likeliest":
            return [lambda each=each: ops.sampling.likeliest(each) for each in logits]
        starts, positions = np.arange(rows, dtype=np.uint64), np.arange(rows)
        return [lambda each=each: ops.sampling.draw(each, starts, positions) for each in logits]

    return Case(kernel, f"{rows} x {vocab_size}", 4 * rows * vocab_size, make)


def paged_batch(ops: Backend, query_lens: list[int], seq_lens: list[int], block_size: int = 16) -> Any:
    """Builds the attention of rows whose pages lie in random order."""
    blocks = [-(-length // block_size) for length in seq_lens]
    pages = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    tables = np.zeros((len(seq_lens), max(blocks)), np.int32)
    for row, last in enumerate(np.cumsum(blocks)):
        tables[row, : blocks[row]] = pages[last - blocks[row] : last]
    slots = [
        tables[row, position // block_size] * block_size + position % block_size
        for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - new, length)
    ]
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device="cuda")
    return ops.attention_batch(np.array(query_lens), np.array(seq_lens), tables, slot_mapping, block_size=block_size)


def _cache(ops: Backend, num_pages: int, kv_heads: int, head_dim: int) -> Tensor:
    shape = ops.kv_cache_shape(num_pages, 16, kv_heads, head_dim, BF16)
    return torch.randn(shape, device="cuda", dtype=BF16)


if __name__ == "__main__":
    main()
