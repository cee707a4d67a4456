"""DeepSeek V4's attention: to the latest tokens, and to compressed rows of all earlier tokens.

All heads share one key a token, which is the value, too. A row of few tokens overlaps the next, and an indexer selects
among them (compressed sparse attention). Rows of many tokens are all seen (heavily compressed attention). The inputs of
a row are cached until it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.compressed_rows import Compressor, RowPlaces, rotate_last
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.layer_kv import LatentKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear, whole
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.cache_rows import split_rows
from quire.ops.latent import CacheRows


@dataclass(frozen=True)
class CompressedShape:
    """Sizes of a layer, before its heads are split over ranks.

    Attributes:
        q_lora_rank: of the queries' latent.
        window: latest tokens that a token sees, itself included.
        num_groups: groups in which the heads' outputs are projected, to `group_rank` values each.
        rate: tokens of a row; None: there are no rows.
        index_heads: of the indexer; 0: a token sees all rows.
        index_top_k: the most rows that a token sees.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    q_lora_rank: int
    window: int
    num_groups: int
    group_rank: int
    rate: int | None = None
    index_heads: int = 0
    index_head_dim: int = 0
    index_top_k: int = 0


class CompressedAttention:
    """One layer's attention on one rank, with an equal part of the heads, in whole groups, and all rows.

    Attributes:
        kv: the layer's caches: latest tokens; with rows, also their inputs, and the rows.
        activation_size: values that the layer computes for each token.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: CompressedShape,
        rotary: RotaryEmbedding,
        style: NormStyle,
    ) -> None:
        """Takes a `place` whose `number` is that of the layer's first cache."""
        name, hidden_size = f"{place.name}.attn", shape.hidden_size
        self._ops = context.ops
        self._place = place
        self._shape = shape
        self._rotary = rotary
        self._eps = style.eps
        self._dtype = context.dtype
        own_groups = context.share(shape.num_groups, "groups of outputs of attention")
        self._num_heads = context.share(shape.num_heads, "attention heads")
        self._compressors: list[Compressor] = []
        down = [(f"{name}.wq_a", shape.q_lora_rank), (f"{name}.wkv", shape.head_dim)]
        if shape.rate is not None:
            names = [(f"{name}.compressor", shape.head_dim)]
            names += [(f"{name}.indexer.compressor", shape.index_head_dim)] if shape.index_heads else []
            for source, size in names:
                compressor = Compressor(
                    context, source, size, shape.rate, rotary, style, overlaps=shape.index_heads > 0
                )
                self._compressors.append(compressor)
                down += [(f"{source}.{part}", compressor.source_size // 2) for part in ("wkv", "wgate")]
        self._down = ColumnLinear(context, [whole(*part) for part in down], hidden_size)
        self._source_sizes = [compressor.source_size for compressor in self._compressors]
        self.kv = [LatentKV((shape.head_dim,), window=shape.window)]
        if shape.rate is not None:
            self.kv += [
                LatentKV((sum(self._source_sizes),), window=self._compressors[0].num_tokens, can_be_quantized=False),
                LatentKV(tuple(compressor.size for compressor in self._compressors), rate=shape.rate),
            ]

        self._q_norm = RMSNorm(context, f"{name}.q_norm", shape.q_lora_rank, style)
        q_size = shape.num_heads * shape.head_dim
        q_part = LinearPart(f"{name}.wq_b", q_size, context.shard(0, q_size, "query outputs"))
        self._q = ColumnLinear(context, [q_part], shape.q_lora_rank)
        kv_norm = f"{name}.kv_norm" if context.find(f"{name}.kv_norm.weight") is not None else f"{name}.norm"
        self._kv_norm = RMSNorm(context, kv_norm, shape.head_dim, style)
        heads = context.shard(0, shape.num_heads, "attention heads")
        self._sinks = context.read(f"{name}.attn_sink", (shape.num_heads,), heads, torch.float32)
        self._index_q: ColumnLinear | None = None
        if shape.index_heads:
            indexer = f"{name}.indexer"
            index_q = whole(f"{indexer}.wq_b", shape.index_heads * shape.index_head_dim)
            self._index_q = ColumnLinear(context, [index_q], shape.q_lora_rank)
            self._index_weights = ColumnLinear(
                context, [whole(f"{indexer}.weights_proj", shape.index_heads)], hidden_size
            )
        inner, group_inputs = shape.num_groups * shape.group_rank, q_size // shape.num_groups
        part = LinearPart(f"{name}.wo_a", inner, context.shard(0, inner, "grouped outputs"))
        weight = context.read_dequantized(part, group_inputs)
        self._group_output = weight.view(own_groups, shape.group_rank, group_inputs).transpose(1, 2).contiguous()
        self._output = RowLinear(
            context, f"{name}.wo_b", inner, hidden_size, context.shard(1, inner, "grouped outputs")
        )
        index_size = shape.index_heads * (shape.index_head_dim + 1)
        self.activation_size = sum(size for _, size in down) + 4 * self._num_heads * shape.head_dim + index_size

    def __call__(self, x: Tensor, step: StepContext, places: Sequence[RowPlaces]) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects.

        `places` are those in the groups of the layer's caches.
        """
        shape = self._shape
        cos, sin = step.rotation(self._rotary)
        sizes = [shape.q_lora_rank, shape.head_dim, sum(self._source_sizes)]
        q_latent, kv, sources = self._down(x).split(sizes, dim=-1)
        kv = rotate_last(self._kv_norm(kv).unsqueeze(1), cos, sin).squeeze(1)
        self._store(step, 0, kv)
        if self._compressors:
            self._store(step, 1, sources)
            self._store_complete_rows(step, places)

        if self._place.is_last and step.wanted is not None:
            tokens = step.wanted.tokens
            x, q_latent = self.outputs_of(x, step), self.outputs_of(q_latent, step)
            places = [each.of(tokens) for each in places]
            cos, sin = step.wanted_rotation(self._rotary)
        q_latent = self._q_norm(q_latent)
        q = self._q(q_latent).unflatten(1, (self._num_heads, shape.head_dim))
        q = q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + self._eps).to(q.dtype)
        q = rotate_last(q, cos, sin)
        index = self._indexed(x, q_latent, cos, sin)
        out = torch.empty_like(q)
        for part in places[-1].parts(shape.rate):
            some = [each.of(part) for each in places]
            rows = [some[0].latest(self._pages(step, 0), shape.window)]
            if self._compressors:
                rows.append(self._seen_rows([each[part] for each in index], step, some[2]))
            out[part] = self._ops.latent.attend_rows(q[part], rows, self._sinks, scale=shape.head_dim**-0.5)
        out = rotate_last(out, cos, sin, back=True)
        grouped = out.reshape(len(out), len(self._group_output), -1)
        return self._output(self._ops.latent.head_linear(grouped, self._group_output).flatten(1))

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        if self._place.is_last and step.wanted is not None:
            return rows.index_select(0, step.wanted.tokens)
        return rows

    def _pages(self, step: StepContext, number: int) -> Tensor:
        """Returns the pages of one of the layer's caches."""
        return step.caches[self._place.number + number].pages

    def _store(self, step: StepContext, number: int, rows: Tensor) -> None:
        """Stores a row for each of the step's tokens."""
        pages, group = step.caches[self._place.number + number]
        self.kv[number].store(self._ops, rows, pages, step.attention[group].slot_mapping)

    def _store_complete_rows(self, step: StepContext, places: Sequence[RowPlaces]) -> None:
        """Computes and stores the rows that the step's tokens complete."""
        rate, pages = self._shape.rate, self._pages(step, 1)
        assert rate is not None
        tokens = places[2].completing(rate)
        if not len(tokens):
            return
        slots = places[1].before(tokens, self._compressors[0].num_tokens)
        sources = self.kv[1].read(pages, slots, self._dtype)
        positions = step.positions[tokens]
        parts = zip(self._compressors, sources.split(self._source_sizes, dim=-1), strict=True)
        rows = torch.cat([compressor(part, positions) for compressor, part in parts], dim=-1)
        self.kv[2].store(self._ops, rows, self._pages(step, 2), places[2].own(tokens, rate))

    def _indexed(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Computes the indexer's queries and weights for `LatentOperations.select_rows`; nothing without an indexer."""
        if self._index_q is None:
            return []
        q = self._index_q(q_latent).unflatten(1, (self._shape.index_heads, self._shape.index_head_dim))
        return [rotate_last(q, cos, sin), self._index_weights(x)]

    def _seen_rows(self, index: Sequence[Tensor], step: StepContext, places: RowPlaces) -> CacheRows:
        """Returns the rows that tokens attend to: all, or those that the indexer selects (arXiv:2512.02556, section
        2.1).

        `index` is the result of `_indexed` for these tokens.
        """
        shape, pages = self._shape, self._pages(step, 2)
        assert shape.rate is not None
        rows, *index_keys = split_rows(pages, self.kv[2].parts)
        if not index:
            return places.complete(rows, shape.rate)
        q, weights = index
        chosen = self._ops.latent.select_rows(
            q, weights, places.complete(index_keys[0], shape.rate), top_k=shape.index_top_k,
            scale=(shape.index_heads * shape.index_head_dim) ** -0.5,
        )  # fmt: skip
        return chosen._replace(cache=rows)
