"""The bytes that a decode step's kernels move, counted from their arguments: hardly more than weights and cache."""

import math
from typing import Any

import pytest
from torch import Tensor

from quire.ops.triton.attention import PROGRAMS_PER_PROCESSOR
from quire.ops.triton.decode_units import split_len
from quire.ops.triton.launch import Kernel
from tests.ops.triton.dense_steps import SHAPES, Shape, Steps

NUM_PROGRAMS = PROGRAMS_PER_PROCESSOR * 132
PAGES, PARTS = {"cache_ptr"}, {"parts_ptr", "part_sums_ptr"}
MOST = {1: 1.03, 64: 1.06}
"""Times weights and cache, by rows. Of many, activations and sums of splits count, and mostly stay in the L2 cache."""


class Moved:
    """Counts what launches read and write: each tensor once, and twice what is both.

    Attributes:
        num_bytes: but for pages, of which a kernel reads what its rows say.
        seen: names of kernels.
    """

    def __init__(self, shape: Shape, seq_lens: list[int]) -> None:
        self._shape, self._seq_lens = shape, seq_lens
        self.num_bytes = 0
        self.seen: set[str] = set()

    def note(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        self.seen.add(kernel.name)
        given = zip(kernel.arguments, arguments, strict=True)
        tensors = {value.data_ptr(): (name, value) for name, value in given if isinstance(value, Tensor)}
        for name, value in tensors.values():
            if name in PAGES or name == "counters_ptr":
                continue
            if name in PARTS:
                self.num_bytes += 2 * self._parts_bytes() if name == "parts_ptr" else 0
            else:
                self.num_bytes += value.nbytes * (2 if name == "residual_ptr" else 1)

    def _parts_bytes(self) -> int:
        """Of the splits that wait to be merged: with few rows, so that all programs have work."""
        splits = [math.ceil(length / split_len(length)) for length in self._seq_lens]
        kv_heads, size = self._shape.num_kv_heads, 4 * self._shape.num_heads * (self._shape.head_dim + 2)
        waiting = [each for each in splits if each > 1 and NUM_PROGRAMS * each > 2 * kv_heads * sum(splits)]
        return sum(waiting) * size


@pytest.mark.parametrize("num_rows", MOST)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=["0.6B", "8B"])
def test_a_decode_step_moves_weights_and_cache(shape: Shape, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seq_lens = [1000] * num_rows
    moved = Moved(shape, seq_lens)
    monkeypatch.setattr(Kernel, "__call__", lambda self, _, *arguments, **__: moved.note(self, arguments))
    steps = Steps(shape)
    steps.run(seq_lens)
    needed = steps.weight_bytes + steps.cache_bytes(seq_lens)
    assert {"multiply_few", "rotate_and_attend", "add_rms_norm_rows"} <= moved.seen
    assert needed < moved.num_bytes + steps.cache_bytes(seq_lens) <= MOST[num_rows] * needed
