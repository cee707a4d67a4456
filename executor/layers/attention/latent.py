"""Multi-head latent attention over the paged cache (arXiv:2405.04434, section 2.1).

Keys and values of all heads are linear in one latent vector a token. So the cache holds only the latent and one more
key, which carries the positions. Attention is computed in the latent space: the matrix that expands latents into keys
is applied to the queries instead, and the one that expands them into values to the outputs.

Sparse attention sees only some tokens. The indexer's keys lie behind the latents in the cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.expansion import ExpansionAdapters, LatentExpansion
from quire.executor.layers.attention.grouped_query import LayerPlace, head_gates
from quire.executor.layers.attention.layer_kv import LatentKV
from quire.executor.layers.attention.query_temperature import QueryTemperature
from quire.executor.layers.attention.token_selection import TokenSelector
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear, whole
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.cache_rows import row_size
from quire.ops.latent import NewLatents


@dataclass(frozen=True)
class LatentShape:
    """Sizes of the whole model's latent attention, before its heads are split over ranks.

    Attributes:
        q_lora_rank: of the queries' own latent; None: queries are projected directly.
        kv_lora_rank: of the latent that keys and values share.
        nope_head_dim: of a head's queries and keys, the part without positions.
        rope_head_dim: of a head's queries, the rotated part, and of the rotated key that all heads share.
        v_head_dim: of a head's values.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int

    @property
    def q_head_dim(self) -> int:
        """Size of a head's queries."""
        return self.nope_head_dim + self.rope_head_dim


class LatentAttention:
    """Projections into and out of the latent space, rotation, cache and output of one layer.

    Every rank has an equal part of the heads, and all latents, or those of some positions.

    Attributes:
        kv: the layer's cached rows.
        activation_size: values that the layer computes for each token.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: LatentShape,
        rotary: RotaryEmbedding | None,
        *,
        scale: float,
        bias: bool = False,
        is_interleaved: bool = True,
        selector: TokenSelector | None = None,
        has_head_gates: bool = False,
        temperature: QueryTemperature | None = None,
    ) -> None:
        """`scale` multiplies the scores; `bias` is that of the projections into latents and of the output.

        `is_interleaved`: the checkpoint rotates pairs (2i, 2i + 1), not (i, i + rope_head_dim / 2). Without a
        `selector`, a token sees all tokens before it; without `rotary`, nothing is rotated. If it `has_head_gates`, the
        projection `g_proj` has one gate for each head, whose sigmoid multiplies the head's outputs. `temperature`
        multiplies queries.

        Raises:
            ModelLoadError: a `selector`, and ranks that divide sequences; heads that cannot be divided.
        """
        self._sequences = context.sequences
        context.sequences.check_heads(context.group.size, 1)
        if selector is not None:
            context.sequences.refuse("sparse attention, which chooses among all positions")
        name, hidden_size = f"{place.name}.self_attn", shape.hidden_size
        self._ops = context.ops
        self._place = place
        self._rotary = rotary
        self._shape = shape
        self._scale = scale
        self._is_interleaved = bool(is_interleaved) and rotary is not None  # config.json may have null
        self._no_rotation = torch.empty(1, 1, 0, dtype=context.dtype, device=context.device)
        self._num_heads = context.share(shape.num_heads, "attention heads")
        self._selector = selector
        self._temperature = temperature
        self._latent_size = shape.kv_lora_rank + shape.rope_head_dim
        self._latent_parts = (shape.kv_lora_rank, shape.rope_head_dim)
        keys = (selector.key_size,) if selector is not None and selector.key_size else ()
        self.kv = LatentKV((*self._latent_parts, *keys))
        self.activation_size = (shape.q_lora_rank or 0) + self._latent_size + self._num_heads * (
            shape.q_head_dim + shape.rope_head_dim + 2 * shape.kv_lora_rank + shape.v_head_dim
        ) + (selector.activation_size if selector is not None else 0)  # fmt: skip
        self.activation_size += context.sequences.activation_size(
            self._num_heads, self._latent_size, shape.kv_lora_rank
        )  # fmt: skip

        down = [whole(f"{name}.kv_a_proj_with_mqa", self._latent_size)]
        q_name, q_inputs = f"{name}.q_proj", hidden_size
        self._q_norm: RMSNorm | None = None
        if shape.q_lora_rank is not None:
            down.insert(0, whole(f"{name}.q_a_proj", shape.q_lora_rank))
            q_name, q_inputs = f"{name}.q_b_proj", shape.q_lora_rank
            self._q_norm = RMSNorm(context, f"{name}.q_a_layernorm", shape.q_lora_rank, _NORM)
        self._down = ColumnLinear(context, down, hidden_size, bias=bias)
        q_size = shape.num_heads * shape.q_head_dim
        self._q = ColumnLinear(
            context, [LinearPart(q_name, q_size, context.shard(0, q_size, "query outputs"))], q_inputs
        )
        self._kv_norm = (_NORM.read(context, f"{name}.kv_a_layernorm", shape.kv_lora_rank), _NORM.eps)
        self._expansion = _expansion(context, f"{name}.kv_b_proj", shape)
        self._gate: ColumnLinear | None = None
        if has_head_gates:
            self._gate = ColumnLinear(context, [head_gates(context, f"{name}.g_proj", shape.num_heads)], hidden_size)
        v_size = shape.num_heads * shape.v_head_dim
        self._output = RowLinear(
            context, f"{name}.o_proj", v_size, hidden_size, context.shard(1, v_size, "value outputs"), bias=bias
        )

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        pages, group = step.caches[self._place.number]
        row = sum(row_size(size, pages.dtype) for size in self._latent_parts)
        latents, keys = pages[..., :row], pages[..., row:]
        latent, q_input = self._down(x), x
        if self._q_norm is not None:
            rank = latent.shape[1] - self._latent_size
            q_input, latent = self._q_norm(latent[:, :rank]), latent[:, rank:]
        q = self._q(q_input)
        if self._temperature is not None:
            q = self._temperature(self._ops, q, step)
        cos, sin = (self._no_rotation,) * 2 if self._rotary is None else step.rotation(self._rotary)
        q_rotated = self._ops.latent.rotate_and_store_latent(NewLatents(
            self._heads(q)[..., self._shape.nope_head_dim :], latent, self._kv_norm, cos, sin, latents,
            step.attention[group].slot_mapping, is_interleaved=self._is_interleaved,
        ))  # fmt: skip
        selection = None if self._selector is None else self._selector(x, q_input, step, keys, group)
        wanted = step.wanted if self._place.is_last else None
        if wanted is not None:
            q = self.outputs_of(q, step)
            q_rotated = self.outputs_of(q_rotated.flatten(1), step).unflatten(1, q_rotated.shape[1:])
        q_latent = self._expansion.on_queries(self._heads(q)[..., : self._shape.nope_head_dim])
        own = wanted or step
        if selection is None:
            out = self._sequences.attend_to_latents(
                self._ops, q_latent, q_rotated, latents, own, group, scale=self._scale
            )  # fmt: skip
        else:
            out = self._ops.latent.latent_attention(
                q_latent, q_rotated, latents, own.attention[group], scale=self._scale, selection=selection
            )
        out = self._expansion.on_outputs(out).flatten(1)
        if self._gate is not None:
            out = self._ops.recurrent.multiply_gate(out, self._gate(self.outputs_of(x, step)), "sigmoid")
        return self._output(out)

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        if self._place.is_last and step.wanted is not None:
            return self._ops.take_rows(rows, step.wanted.tokens)
        return rows

    def _heads(self, q: Tensor) -> Tensor:
        return q.view(len(q), self._num_heads, self._shape.q_head_dim)


_NORM = NormStyle(1e-6)
"""The latents' norms, whose eps is not in config.json."""


def _expansion(context: ModelContext, name: str, shape: LatentShape) -> LatentExpansion:
    """Reads the rank's heads of the layer that expands latents into keys and values."""
    size = shape.num_heads * (shape.nope_head_dim + shape.v_head_dim)
    part = LinearPart(name, size, context.shard(0, size, "key and value outputs"))
    if context.find(f"{name.replace('kv_b', 'k_b')}.weight") is None:
        return LatentExpansion.read(context, part, shape.kv_lora_rank, shape.nope_head_dim, shape.v_head_dim)
    to_latent, to_values = _separate_expansions(context, name, shape)
    adapters = ExpansionAdapters.of(context, part, shape.kv_lora_rank, shape.nope_head_dim)
    return LatentExpansion(context.ops, to_latent, to_values, adapters)


def _separate_expansions(context: ModelContext, name: str, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """Reads the factors of `LatentExpansion` from GGUF files, which have [heads, kv_lora_rank, nope_head_dim] and
    [heads, v_head_dim, kv_lora_rank] instead of the layer `name`.
    """
    heads = context.shard(0, shape.num_heads, "attention heads")
    keys, values = (
        context.read(f"{name.replace('kv_b', kind)}.weight", (shape.num_heads, *size), heads).mT.contiguous()
        for kind, size in (
            ("k_b", (shape.kv_lora_rank, shape.nope_head_dim)),
            ("v_b", (shape.v_head_dim, shape.kv_lora_rank)),
        )
    )
    return keys, values
