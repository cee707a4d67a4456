"""Dual chunk attention (arXiv:2402.17463): no query is farther from a key than in the model's training.

Sequences are divided into chunks, and keys are rotated by their places in them. A query has three rotations: towards
keys of its own chunk, at their true distances; of the previous chunk, at their true distances up to the longest that
the model knows; and of earlier chunks, at that longest distance. Attention is exact: the sparse prefill of
arXiv:2407.02490, for which a checkpoint may have patterns, approximates it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.attention.sequence import SequenceAttention, self_attention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import DualChunks, RotaryEmbedding
from quire.executor.layers.step_context import StepContext, Wanted
from quire.ops.backend import AttentionForm


def rotated_attention(
    context: ModelContext, config: Mapping[str, Any], head_dim: int
) -> Callable[..., Attention | SequenceAttention]:
    """Returns a builder of layers that takes all arguments of `Attention` except `rotary`, which config.json describes.

    Layers have chunks only if a sequence can be so long that they make a difference.
    """
    chunks = DualChunks.of(config)
    if chunks is None or context.max_model_len <= chunks.plain_length:
        return partial(self_attention, rotary=RotaryEmbedding(context, config, head_dim))
    return partial(DualChunkAttention, rotary=DualChunkRotary(context, config, head_dim, chunks))


class DualChunkRotary:
    """The rotations of keys and queries.

    Attributes:
        own: by a token's place in its chunk, for keys and for queries towards their own chunk.
        others: by the chunk of a query's keys: from its place in its own chunk to its position towards those keys.
    """

    def __init__(self, context: ModelContext, config: Mapping[str, Any], head_dim: int, chunks: DualChunks) -> None:
        self.chunks = chunks

        def rotary(map_positions: Callable[[Tensor], Tensor]) -> RotaryEmbedding:
            return RotaryEmbedding(context, config, head_dim, map_positions=map_positions)

        self.own = rotary(self._place)
        if self.own.scale != 1:
            raise ModelLoadError("config.json: dual_chunk_attention_config is not supported with a rope that scales.")
        self.others: dict[Literal["previous", "earlier"], RotaryEmbedding] = {
            "previous": rotary(lambda positions: self._towards_others(self._place(positions)) - self._place(positions)),
            "earlier": rotary(lambda positions: self._farthest - self._place(positions)),
        }

    @property
    def _farthest(self) -> int:
        return min(self.chunks.most, 2 * self.chunks.length - 1)

    def _place(self, positions: Tensor) -> Tensor:
        # A torch operation: it prevents recordings on a CPU, where a step's parts depend on more than its rows.
        return positions % self.chunks.length

    def _towards_others(self, places: Tensor) -> Tensor:
        return (places + self.chunks.length).clamp(max=self.chunks.most)


class DualChunkAttention(Attention):
    """Attention whose queries are rotated differently for keys of the same, the previous and earlier chunks."""

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        rotary: DualChunkRotary,
        *,
        form: AttentionForm,
        **options: Any,
    ) -> None:
        """`form` sees all tokens; `options` are those of `Attention`.

        Raises:
            ModelLoadError: another form, or ranks that cannot divide its chunks.
        """
        if form != AttentionForm(form.scale):
            raise ModelLoadError(
                "config.json: dual_chunk_attention_config is not supported with sliding windows; --max-model-len "
                f"{rotary.chunks.plain_length} needs no chunks."
            )
        super().__init__(context, place, shape, rotary.own, form=form, **options)
        self._chunks = rotary.chunks
        self._others = rotary.others
        self.activation_size += 5 * self._num_heads * self.kv.head_dim  # two more queries, and outputs of three parts
        context.sequences.check(form._replace(chunk=self._chunks.length))
        # Twice: the other queries that ranks gather, and copies in which one query replaces another.
        self.activation_size += 2 * context.sequences.activation_size(
            self._num_heads, self.kv.head_dim, self.kv.head_dim
        )  # fmt: skip

    def _attend(self, q: Tensor, step: StepContext, wanted: Wanted | None) -> Tensor:
        pages, group = step.caches[self._place.number]
        own, chunks, ops = wanted or step, self._chunks, self._ops
        longest = self._sequences.longest(own, group)
        if longest is None or longest > chunks.trained:
            q = chunks.sharpen(q, step.positions if wanted is None else step.wanted_positions)
        if longest is not None and longest <= chunks.length:
            return super()._attend(q, step, wanted)
        form = self._form._replace(chunk=chunks.length)
        rotation = step.rotation if wanted is None else step.wanted_rotation
        queries = [q, *(ops.rotary(q, *rotation(self._others[which])) for which in ("previous", "earlier"))]
        return self._sequences.attend_in_chunks(ops, queries, pages, own, group, form)
