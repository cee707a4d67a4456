"""BigBird-Pegasus (arXiv:2007.14062): Pegasus with learned positions, whose encoder sees blocks of long texts."""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import AttentionShape
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import size_of
from quire.executor.models.encoder_decoders.bart import BartForConditionalGeneration
from quire.executor.weights.rearranged import Piece

_SPARSE, _FULL = "block_sparse", "original_full"


class BigBirdPegasusForConditionalGeneration(BartForConditionalGeneration):
    """Norms before blocks and after all layers."""

    SIZES = (*BartForConditionalGeneration.SIZES, "block_size", "num_random_blocks")
    ENCODER_PIECES: ClassVar = {
        "self_attn.q_proj": Piece("self_attn.self.query"),
        "self_attn.k_proj": Piece("self_attn.self.key"),
        "self_attn.v_proj": Piece("self_attn.self.value"),
        "self_attn.o_proj": Piece("self_attn.output"),
    }
    first_position = 0
    norms_first = True
    norms_embedding = False

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        kind = spec.hf_config.get("attention_type", _SPARSE)
        if kind not in (_SPARSE, _FULL):
            raise ModelLoadError(
                f"config.json of {spec.name}: attention_type must be {_SPARSE} or {_FULL}, got {kind!r}."
            )
        self.attention_biases = bool(spec.hf_config.get("use_bias", False))
        super().__init__(spec, context)

    def encoder_attention(
        self, spec: ModelSpec, context: ModelContext, name: str, shape: AttentionShape, index: int
    ) -> SequenceAttention:
        if spec.hf_config.get("attention_type", _SPARSE) == _FULL:
            return super().encoder_attention(spec, context, name, shape, index)
        blocks = size_of(spec, "block_size"), size_of(spec, "num_random_blocks")
        return _BlockSparseAttention(context, name, shape, self.attention_biases, *blocks)

    def ends(self, side: str) -> dict[str, str]:
        return super().ends(side) | {"last_norm": f"{side}.layernorm_embedding"}


class _BlockSparseAttention(SequenceAttention):
    """In a long text, the first block and the last see all tokens; another sees these two, itself and its neighbours.

    Blocks see random blocks as well when the model is trained, of which each is the first block at inference, as in the
    library: its keys count once more for each.
    """

    def __init__(
        self, context: ModelContext, name: str, shape: AttentionShape, bias: bool, block: int, num_random: int
    ) -> None:
        super().__init__(context, name, shape, bias=bias, output_bias=bias)
        self._block = block
        self._most_of_full = (5 + 2 * num_random) * block  # tokens of the longest text that is seen as a whole
        self._weight_of_first = math.log1p(num_random)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        starts = np.flatnonzero(step.positions.cpu().numpy() == 0)
        lengths = np.diff(starts, append=len(x))
        is_long = lengths > self._most_of_full
        if not is_long.any():
            return super().__call__(x, step)
        heads = self._project(x).unflatten(1, (-1, self._head_dim))
        out = heads.new_empty(len(x), self.num_heads, self._head_dim)
        if not is_long.all():
            places = torch.from_numpy(np.flatnonzero(np.repeat(~is_long, lengths))).to(x.device)
            batch = self._ops.sequence_batch(lengths[~is_long], x.device)
            out[places] = self._ops.sequence_attention(heads[places], self._num_kv_heads, batch, self._form)
        for start, length in zip(starts[is_long].tolist(), lengths[is_long].tolist(), strict=True):
            out[start : start + length] = self._of_text(heads[start : start + length])
        return self._output(out.flatten(1))

    def _of_text(self, heads: Tensor) -> Tensor:
        """Returns the outputs [num_tokens, num_heads, head_dim] of a long text."""
        rows = heads.float().transpose(0, 1)
        q, k, v = rows.split([self.num_heads, self._num_kv_heads, self._num_kv_heads])
        places = torch.arange(len(heads), device=heads.device)
        blocks = places.split(self._block)
        last = len(blocks) - 1
        outputs = []
        for number, own in enumerate(blocks):
            if number in (0, last):
                outputs.append(self._attend(q[:, own], k, v))
                continue
            seen = torch.cat([blocks[each] for each in sorted({0, number - 1, number, number + 1, last})])
            extra = torch.where(seen < self._block, self._weight_of_first, 0.0)
            outputs.append(self._attend(q[:, own], k[:, seen], v[:, seen], extra))
        return torch.cat(outputs, dim=1).transpose(0, 1).to(heads.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(1, 2) * self._form.scale
        return torch.softmax(scores if extra is None else scores + extra, -1) @ v
