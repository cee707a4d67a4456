"""No kernel is compiled while requests run: steps ask for variants of the lists alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from quire.ops.backend import AttentionForm, NewHeads
from quire.ops.sampling import RowParameters, TokenPlaces
from quire.ops.triton import launch
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.binaries import Binary, store
from quire.ops.triton.driver import Driver
from quire.ops.triton.jobs import Job
from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.launcher import Launcher
from quire.ops.triton.variants import is_listed
from tests.ops.triton.fake_driver import FakeLibrary

BLOCK_SIZE, VOCABULARY = 16, 1000
DTYPE = torch.bfloat16


class Shape(NamedTuple):
    """A dense model's sizes."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    has_head_norms: bool = False


SHAPES = [
    Shape(1024, 16, 8, 128, 3072, has_head_norms=True),
    Shape(2048, 32, 8, 64, 8192),
    Shape(4096, 32, 8, 128, 12288, has_head_norms=True),
    Shape(4096, 32, 8, 128, 14336),
    Shape(3584, 28, 4, 128, 18944),
]
"""Of Qwen3-0.6B, Llama-3.2-1B, Qwen3-8B, Llama-3-8B and Qwen2.5-7B."""


class Steps:
    """Decode steps of one layer, without the kernels' work: memory holds whatever it holds."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._ops = shape, TritonBackend()
        hidden, heads, dim = shape.hidden, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
        self._norm = self._empty(hidden)
        self._qkv = self._ops.pack_linear(self._empty(heads * dim, hidden))
        self._output = self._ops.pack_linear(self._empty(hidden, shape.num_heads * dim))
        self._gate_up = self._ops.pack_gated_linear(self._empty(2 * shape.intermediate, hidden))
        self._down = self._ops.pack_linear(self._empty(hidden, shape.intermediate))
        self._head = self._ops.pack_linear(self._empty(VOCABULARY, hidden))
        norms = self._empty(shape.num_heads + shape.num_kv_heads, dim)
        self._head_norms = (norms, 1e-6) if shape.has_head_norms else None
        cache = self._ops.kv_cache_shape(4, BLOCK_SIZE, shape.num_kv_heads, dim, DTYPE)
        self._cache = self._empty(*cache)
        self._frequencies = torch.empty(dim // 2)

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=DTYPE)

    def run(self, seq_lens: list[int], *, is_greedy: bool) -> None:
        ops, shape, num_tokens = self._ops, self._shape, len(seq_lens)
        lengths = np.array(seq_lens)
        tables = np.zeros((num_tokens, -(-int(lengths.max()) // BLOCK_SIZE)), dtype=np.int64)
        slots = torch.empty(num_tokens, dtype=torch.int64)
        batch = ops.attention_batch(np.ones_like(lengths), lengths, tables, slots, block_size=BLOCK_SIZE)
        positions = torch.empty(num_tokens, dtype=torch.int64)
        cos, sin = ops.rotation(positions, self._frequencies, 1.0, DTYPE)
        residual = self._empty(num_tokens, shape.hidden)
        x = ops.rms_norm(residual, self._norm, 1e-6)
        heads = ops.linear(x, self._qkv).view(num_tokens, -1, shape.head_dim)
        form = AttentionForm(shape.head_dim**-0.5)
        new = NewHeads(heads, cos, sin, self._cache, slots, norm=self._head_norms)
        attended = ops.rotate_and_attend(new, batch, form)
        x, residual = ops.add_rms_norm(ops.linear(attended.flatten(1), self._output), residual, self._norm, 1e-6)
        x = ops.linear(ops.gated_linear(x, self._gate_up), self._down)
        x, _ = ops.add_rms_norm(x, residual, self._norm, 1e-6)
        logits = ops.linear(x, self._head)
        if is_greedy:
            ops.sampling.likeliest(logits)
        else:
            ops.sampling.draw(logits.float(), np.arange(num_tokens, dtype=np.uint64), lengths)
        ops.sampling.choose(logits, None if is_greedy else self._parameters(num_tokens), self._places(num_tokens))

    def _parameters(self, num_rows: int) -> RowParameters:
        """Of any values: kernels do not run."""
        types = dict.fromkeys(("slots", "positions", "starts", "top_k"), torch.int64)
        types |= dict.fromkeys(("num_unnamed", "num_prompt_tokens"), torch.int32)
        types |= {"is_greedy": torch.int8, "top_p": torch.float64}
        return RowParameters(
            *(torch.empty(num_rows, dtype=types.get(name, torch.float32)) for name in RowParameters._fields)
        )

    def _places(self, num_rows: int) -> TokenPlaces:
        memory = torch.empty(4 * 3000 + 2, dtype=torch.int32)
        places, ring = torch.empty(num_rows, dtype=torch.int64), torch.empty(8, 2048, dtype=torch.uint8)
        return TokenPlaces(memory[:-2].view(4, 3000), memory, places, ring, torch.empty(1, dtype=torch.int64))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Forms that were asked for and that no list has."""
    unlisted: set[str] = set()

    def pretend(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        if not is_listed(kernel, job.specialization):
            unlisted.add(f"{kernel.name}{job.specialization}")
        binary = Binary(job.key, kernel.name, "", job.arch, "3", kernel.name, 0, 4, 0, 0, 1, 0, False)
        store(folder, binary, b"\x7fELF")
        return binary

    launcher = Launcher(Driver(NoArguments()), "sm_90", [tmp_path], lambda: (0, 0), pretend)
    monkeypatch.setattr(launch, "launcher_of_process", lambda: launcher)
    yield unlisted
    assert launcher.num_compiled > 10  # the kernels were launched by it


class NoArguments(FakeLibrary):
    """Does not read the arguments."""

    def __init__(self) -> None:
        super().__init__({})

    def _launch(self, *_: Any) -> int:
        return 0


def test_a_thousand_random_decode_steps_ask_for_listed_variants_alone(asked: set[str]) -> None:
    random = np.random.default_rng(0)
    for shape in SHAPES:
        steps = Steps(shape)
        for _ in range(1000 // len(SHAPES)):
            num_rows = int(random.choice([1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128]))
            lengths = random.integers(1, int(random.choice([20, 200, 3000])), num_rows)
            steps.run(lengths.tolist(), is_greedy=bool(random.integers(2)))
    assert asked == set()
