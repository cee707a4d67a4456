"""Qwen4-Exp's sparse attention: grouped-query attention to the blocks of tokens that an indexer selects.

The indexer caches a small key of each token. Neighbouring tokens form a block, whose key is the mean of theirs. A token
sees the complete blocks with the highest scores, and the tokens after the last complete one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.executor.layers.attention.compressed_rows import RowPlaces, StepPlaces
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.attention.layer_kv import AttentionKV, LatentKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext, Wanted
from quire.ops.latent import Selection


@dataclass(frozen=True)
class BlockIndexerShape:
    """Sizes of a model's indexers; every rank has all of their heads.

    Attributes:
        rate: tokens of a block.
        top_k: the most blocks that a token attends to.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rate: int
    top_k: int


class BlockIndexer:
    """Scores blocks of tokens, and selects the best.

    A block's score is the sum over heads of `relu(q·k / sqrt(head_dim))`. Its key is normalized, and rotated to the
    position of its first token.

    Attributes:
        kv: its caches: the keys of the latest tokens, and those of complete blocks.
        activation_size: values that it computes for each token.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        name: str,
        shape: BlockIndexerShape,
        rotary: RotaryEmbedding,
        style: NormStyle,
    ) -> None:
        """Takes a `place` whose `number` is that of its first cache."""
        heads, size = shape.num_heads, shape.head_dim
        self._ops = context.ops
        self._dtype = context.dtype
        self._place = place
        self._max_model_len = context.max_model_len
        self._shape = shape
        self._rotary = rotary
        self._qk = ColumnLinear(context, [whole(f"{name}.index_qk_proj", (heads + 1) * size)], shape.hidden_size)
        self._q_norm = RMSNorm(context, f"{name}.q_layernorm", size, style)
        self._k_norm = RMSNorm(context, f"{name}.k_layernorm", size, style)
        self.kv = [LatentKV((size,), window=shape.rate, can_be_quantized=False), LatentKV((size,), rate=shape.rate)]
        self._num_slots = (shape.top_k + 1) * shape.rate - 1
        self.activation_size = 3 * (heads + 1) * size + 3 * self._num_slots  # 4 bytes each, and a mask of 1 byte

    def __call__(self, x: Tensor, step: StepContext, places: StepPlaces, tokens: RowPlaces) -> Selection | None:
        """Selects the tokens to attend to, for those tokens of `x` [num_tokens, hidden] that have an output; None: all.

        `tokens` are the places in the cache from which it selects.
        """
        shape, number = self._shape, self._place.number
        q, k = self._qk(x).split([shape.num_heads * shape.head_dim, shape.head_dim], dim=-1)
        pages, group = step.caches[number]
        batch = step.attention[group]
        self._ops.latent.store_rows(k, pages, batch.slot_mapping)
        self._store_complete_blocks(step, places)
        most = self._max_model_len if batch.positions is None else int(batch.positions.max(initial=-1)) + 1
        if most // shape.rate <= shape.top_k:
            return None
        blocks, positions = places.of(number + 1), step.positions
        cos, sin = step.rotation(self._rotary)
        if self._place.is_last and step.wanted is not None:
            wanted = step.wanted.tokens
            q, tokens, blocks, positions = q[wanted], tokens.of(wanted), blocks.of(wanted), step.wanted_positions
            cos, sin = step.wanted_rotation(self._rotary)
        q = self._ops.rotary(self._q_norm(q.unflatten(1, (shape.num_heads, -1))), cos, sin)
        slots = torch.empty(len(q), self._num_slots, dtype=torch.int32, device=q.device)
        for part in blocks.parts(shape.rate, self._num_slots):
            best = self._chosen(q[part], step.caches[number + 1].pages, blocks.of(part))
            slots[part] = tokens.of(part).at(self._seen(best, positions[part]))
        return Selection(slots, self._num_seen(positions))

    def _store_complete_blocks(self, step: StepContext, places: StepPlaces) -> None:
        """Computes and stores the keys of the blocks that the step's tokens complete."""
        rate, number = self._shape.rate, self._place.number
        tokens = places.of(number).completing(rate)
        if not len(tokens):
            return
        pages = step.caches[number].pages
        slots = places.of(number).before(tokens, rate)
        keys = self.kv[0].read(pages, slots, torch.float32).mean(dim=1).to(self._dtype)
        cos, sin = self._rotary(step.positions[tokens] + 1 - rate)
        keys = self._ops.rotary(self._k_norm(keys).unsqueeze(1), cos, sin).squeeze(1)
        self._ops.latent.store_rows(keys, step.caches[number + 1].pages, places.of(number + 1).own(tokens, rate))

    def _chosen(self, q: Tensor, keys: Tensor, blocks: RowPlaces) -> Tensor:
        """Returns the blocks [num_tokens, top_k] of the highest scores. Indices past the last complete one are
        arbitrary.
        """
        shape = self._shape
        weights = torch.ones_like(q[..., 0])
        rows = blocks.complete(keys, shape.rate)
        return self._ops.latent.best_rows(q, weights, rows, top_k=shape.top_k, scale=shape.head_dim**-0.5)

    def _seen(self, best: Tensor, positions: Tensor) -> Tensor:
        """Returns the positions of the tokens in blocks, then of those after the last block, then the token's own."""
        rate, own = self._shape.rate, positions.unsqueeze(1)
        complete = (own + 1) // rate
        in_blocks = complete.clamp_max(self._shape.top_k) * rate
        index = torch.arange(self._num_slots, device=best.device)
        blocks = best.gather(1, (index // rate).clamp_max(best.shape[1] - 1).expand(len(best), -1))
        after = complete * rate + index - in_blocks
        return torch.where(index < in_blocks, blocks * rate + index % rate, after.minimum(own))

    def leaves_out(self, positions: np.ndarray) -> np.ndarray:
        """Returns True for tokens at `positions` that do not see all tokens before them."""
        return (positions + 1) // self._shape.rate > self._shape.top_k

    def _num_seen(self, positions: Tensor) -> Tensor:
        complete = (positions + 1) // self._shape.rate
        return positions + 1 - (complete - self._shape.top_k).clamp_min(0) * self._shape.rate


class IndexedAttention(Attention):
    """Attention to the tokens that an indexer has selected.

    Attributes:
        kv_layers: the layer's caches: keys and values, then those of its indexer.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        rotary: RotaryEmbedding,
        index: BlockIndexerShape,
        *,
        qk_norm: NormStyle,
        **options: Any,
    ) -> None:
        """Takes a `place` whose `number` is that of its first cache; `options` are those of `Attention`."""
        super().__init__(context, place, shape, rotary, qk_norm=qk_norm, **options)
        own = LayerPlace(place.index, place.number + 1, place.is_last)
        self._indexer = BlockIndexer(context, own, f"{place.name}.self_attn.indexer", index, rotary, qk_norm)
        self.kv_layers: list[AttentionKV] = [self.kv, *self._indexer.kv]
        self.activation_size += self._indexer.activation_size

    def select(self, x: Tensor, step: StepContext, places: StepPlaces) -> None:
        """Selects the tokens that the step's tokens attend to in this layer; `x` is the layer's input."""
        step.selection = self._indexer(x, step, places, places.of(self._place.number))

    def _attend(self, q: Tensor, step: StepContext, wanted: Wanted | None) -> Tensor:
        """Attends as `Attention` does.

        A token that sees all before it is computed densely, also if others are not. Where only the device knows
        positions, all are computed as selected.
        """
        if step.selection is None:
            return super()._attend(q, step, wanted)
        slots, counts = step.selection
        pages, group = step.caches[self._place.number]
        here = (wanted or step).attention[group].positions
        if here is None:
            return self._ops.selected_attention(q, pages, step.selection, scale=self._form.scale)
        far = torch.from_numpy(np.flatnonzero(self._indexer.leaves_out(here))).to(q.device)
        chosen = self._ops.selected_attention(q[far], pages, Selection(slots[far], counts[far]), scale=self._form.scale)
        if len(far) == len(q):
            return chosen
        return super()._attend(q, step, wanted).index_copy_(0, far, chosen)
