"""Steps of one layer of dense models, by the backend's operations; what kernels would compute does not matter."""

from typing import NamedTuple

import numpy as np
import torch

from quire.ops.backend import AttentionForm, NewHeads
from quire.ops.cache_rows import row_size
from quire.ops.sampling import RowParameters, TokenPlaces
from quire.ops.triton.backend import TritonBackend

BLOCK_SIZE, VOCABULARY = 16, 1000
_GIVEN = (torch.int8, torch.float8_e4m3fn)
"""Types of caches whose scales checkpoints bring."""


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
    """Steps of one layer and the head, without the kernels' work: memory holds whatever it holds.

    Attributes:
        weight_bytes: of the layer's weights and the head's.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None
    ) -> None:
        self._shape, self._ops, self._dtype = shape, TritonBackend(), dtype
        self._cache_dtype = cache_dtype or dtype
        self.weight_bytes = 0
        hidden, heads, dim = shape.hidden, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
        self._norm = self._weight(hidden)
        self._qkv = self._ops.pack_linear(self._weight(heads * dim, hidden))
        self._output = self._ops.pack_linear(self._weight(hidden, shape.num_heads * dim))
        self._gate_up = self._ops.pack_gated_linear(self._weight(2 * shape.intermediate, hidden))
        self._down = self._ops.pack_linear(self._weight(hidden, shape.intermediate))
        self._head = self._ops.pack_linear(self._weight(VOCABULARY, hidden))
        norms = self._weight(shape.num_heads + shape.num_kv_heads, dim)
        self._head_norms = (norms, 1e-6) if shape.has_head_norms else None
        cache = self._ops.kv_cache_shape(4, BLOCK_SIZE, shape.num_kv_heads, dim, self._cache_dtype)
        self._cache = torch.empty(cache, dtype=self._cache_dtype)
        self._frequencies = torch.empty(dim // 2)

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype)

    def _weight(self, *size: int) -> torch.Tensor:
        weight = self._empty(*size)
        self.weight_bytes += weight.nbytes
        return weight

    def cache_bytes(self, seq_lens: list[int]) -> int:
        """The bytes of the keys and values of so many tokens."""
        row = row_size(self._shape.head_dim, self._cache_dtype) * self._cache_dtype.itemsize
        return 2 * self._shape.num_kv_heads * sum(seq_lens) * row

    def run(self, seq_lens: list[int], *, is_greedy: bool = True, query_lens: list[int] | None = None) -> None:
        """Each row has one new token, if no other numbers are given."""
        ops, shape, dim = self._ops, self._shape, self._shape.head_dim
        lengths = np.array(seq_lens)
        counts = np.ones_like(lengths) if query_lens is None else np.array(query_lens)
        num_tokens, num_rows = int(counts.sum()), len(seq_lens)
        tables = np.zeros((num_rows, -(-int(lengths.max()) // BLOCK_SIZE)), dtype=np.int64)
        slots = torch.empty(num_tokens, dtype=torch.int64)
        batch = ops.attention_batch(counts, lengths, tables, slots, block_size=BLOCK_SIZE)
        positions = torch.empty(num_tokens, dtype=torch.int64)
        cos, sin = ops.rotation(positions, self._frequencies, 1.0, self._dtype)
        residual = self._empty(num_tokens, shape.hidden)
        x = ops.rms_norm(residual, self._norm, 1e-6)
        heads = ops.linear(x, self._qkv).view(num_tokens, -1, dim)
        scales = torch.ones(2, shape.num_kv_heads) if self._cache_dtype in _GIVEN else None
        for given in (None, scales):  # of each row, or of a checkpoint
            new = NewHeads(heads, cos, sin, self._cache, slots, norm=self._head_norms, scales=given)
            attended = ops.rotate_and_attend(new, batch, AttentionForm(dim**-0.5))
            if scales is None:
                break
        x, residual = ops.add_rms_norm(ops.linear(attended.flatten(1), self._output), residual, self._norm, 1e-6)
        x = ops.linear(ops.gated_linear(x, self._gate_up), self._down)
        x, _ = ops.add_rms_norm(x, residual, self._norm, 1e-6)
        self._sample(ops.linear(x[:num_rows], self._head), lengths, is_greedy=is_greedy)

    def _sample(self, logits: torch.Tensor, lengths: np.ndarray, *, is_greedy: bool) -> None:
        sampling, num_rows = self._ops.sampling, len(logits)
        if is_greedy:
            sampling.likeliest(logits)
        else:
            sampling.draw(logits.float(), np.arange(num_rows, dtype=np.uint64), lengths)
        sampling.choose(logits, None if is_greedy else _parameters(num_rows), _places(num_rows))


def _parameters(num_rows: int) -> RowParameters:
    """Of any values: kernels do not run."""
    types = dict.fromkeys(("slots", "positions", "starts", "top_k"), torch.int64)
    types |= dict.fromkeys(("num_unnamed", "num_prompt_tokens"), torch.int32)
    types |= {"is_greedy": torch.int8, "top_p": torch.float64}
    return RowParameters(
        *(torch.empty(num_rows, dtype=types.get(name, torch.float32)) for name in RowParameters._fields)
    )


def _places(num_rows: int) -> TokenPlaces:
    memory = torch.empty(4 * 3000 + 2, dtype=torch.int32)
    places, ring = torch.empty(num_rows, dtype=torch.int64), torch.empty(8, 2048, dtype=torch.uint8)
    return TokenPlaces(memory[:-2].view(4, 3000), memory, places, ring, torch.empty(1, dtype=torch.int64))
