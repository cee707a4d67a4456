"""CPM-Ant (https://github.com/OpenBMB/CPM-Live/tree/cpm-ant): prompts with attention in both directions, soft prompts.

Every sequence begins with a soft prompt of learned tokens (arXiv:2104.08691). All tokens of the soft prompt and the
prompt see each other; an output token sees the tokens before it. Scores have a bias: by distance within the soft prompt
and within the text (arXiv:1910.10683), and a single value between the two.

The keys and values of a soft prompt depend on the prompt, and have a fixed size. So they are a state, laid out as one
page of a KV cache for each slot. Attention to the soft prompt and to the text is two parts that are merged.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace, own_form
from quire.executor.layers.attention.layer_kv import LayerKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import LanguageModelHead, VocabEmbedding, VocabularyWeight
from quire.executor.models.decoder import layer_places, size_of
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionBatch, AttentionForm, Backend, DeviceRows, NewHeads

_PIECES = {
    "input_layernorm": Piece("self_att.layernorm_before_attention"),
    "self_attn.q_proj": Piece("self_att.self_attention.project_q"),
    "self_attn.k_proj": Piece("self_att.self_attention.project_k"),
    "self_attn.v_proj": Piece("self_att.self_attention.project_v"),
    "self_attn.o_proj": Piece("self_att.self_attention.attention_out"),
    "post_attention_layernorm": Piece("ffn.layernorm_before_ffn"),
    "mlp.gate_proj": Piece("ffn.ffn.w_in.w_0"),
    "mlp.up_proj": Piece("ffn.ffn.w_in.w_1"),
    "mlp.down_proj": Piece("ffn.ffn.w_out"),
}
_ENDS = {"model.embed_tokens": "cpmant.input_embedding", "model.norm": "cpmant.encoder.output_layernorm"}
_TASK = 2
"""The checkpoint's soft prompt for continuing a text."""
_SOFT, _TEXT = 0, 2
"""The segments: the soft prompt, and all other tokens."""


class CpmAntForCausalLM:
    """CPM-Ant on one rank. Implements `quire.executor.models.base.Model`.

    Transformers treats tokens with the id 0 as padding and hides that many leading tokens; here they are tokens.
    """

    SIZES = (
        "dim_head", "dim_ff", "prompt_length", "prompt_types", "segment_types", "position_bias_num_buckets",
        "position_bias_max_distance",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        weights = RearrangedWeights(context.weights, _PIECES, layer="cpmant.encoder.layers.{}", ends=_ENDS)
        context = replace(context, weights=weights)
        size, self._length = spec.hidden_size, size_of(spec, "prompt_length")
        num_rows = spec.vocab_size + size_of(spec, "prompt_types") * self._length
        style = NormStyle(spec.hf_config["eps"])
        biases = _Biases.read(spec, context)
        self._ops = context.ops
        self._embed = VocabEmbedding(
            context, VocabularyWeight(context, "model.embed_tokens.weight", num_rows, size)
        )  # fmt: skip
        segments = context.read("cpmant.segment_embedding.weight", (size_of(spec, "segment_types"), size))
        first = spec.vocab_size + _TASK * self._length
        own = Shard(0, first, first + self._length)
        self._soft_prompt = (
            context.read("model.embed_tokens.weight", (num_rows, size), own).clone().add_(segments[_SOFT])
        )
        self._segment = segments[_TEXT]
        self._layers = [
            _Layer(spec, context, place, style, biases, self._length) for place in layer_places(spec, context)
        ]
        self._norm = RMSNorm(context, "model.norm", size, style)
        self._head = LanguageModelHead(context, VocabularyWeight(context, "lm_head.weight", spec.vocab_size, size))
        self.kv_layers = [layer.attention.kv for layer in self._layers]
        self.state_layers = [layer.attention.state for layer in self._layers]
        self.num_layer_outputs = 0
        self.activation_size = max(
            layer.attention.activation_size + layer.mlp.activation_size for layer in self._layers
        )

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        soft = _SoftPrompts.of(self._ops, self._length, step)
        x = torch.cat((self._embed(token_ids, step) + self._segment, self._soft_prompt.repeat(soft.num_new, 1)))
        for layer in self._layers:
            x = layer(x, soft, step)
        return self._norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


@dataclass(frozen=True)
class _Biases:
    """The biases that are added to the scores of a rank's heads.

    Attributes:
        by_distance: [all num_heads, 2 * reach + 1], within the soft prompt and within the text.
        to_soft: [num_heads], of the text's queries to the soft prompt's keys.
        to_text: [num_heads], of the soft prompt's queries to the text's keys.
    """

    by_distance: Tensor
    to_soft: Tensor
    to_text: Tensor

    @classmethod
    def read(cls, spec: ModelSpec, context: ModelContext) -> "_Biases":
        num_segments, num_heads = size_of(spec, "segment_types"), spec.num_attention_heads
        num_buckets, reach = (size_of(spec, f"position_bias_{name}") for name in ("num_buckets", "max_distance"))
        shape = (num_segments**2 + num_buckets, num_heads)
        table = context.read("cpmant.position_bias.relative_attention_bias", shape, dtype=torch.float32).T
        own = table[slice(*context.shard(0, num_heads, "attention heads")[1:]), num_buckets:]
        buckets = _buckets(torch.arange(-reach, reach + 1), num_buckets, reach).to(context.device)
        by_distance = table.index_select(1, buckets)
        return cls(by_distance, own[:, _TEXT * num_segments + _SOFT], own[:, _SOFT * num_segments + _TEXT])


def _buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Maps `distances` [n] int64, key minus query, to buckets: one for each near distance, wider ones farther off."""
    half = num_buckets // 2
    near = half // 2
    size = distances.abs()
    far = near + (torch.log(size / near) / math.log(max_distance / near) * (half - near)).clamp(max=half).long()
    return (distances > 0) * half + torch.where(size < near, size, far.clamp(max=half - 1))


@dataclass(frozen=True)
class _SoftPrompts:
    """The soft prompts of a step's sequences. Those of new sequences are computed after the step's tokens.

    Attributes:
        num_new: sequences that begin in this step.
        places: [num_new * length] int64, the slots of new soft prompts' keys in a layer's state.
        seen: each wanted token's soft prompt, in the last layer.
        seen_by_all: each token's soft prompt.
        among: new soft prompts, for their own tokens.
        prompts: the prompts of new sequences, for the tokens of their soft prompts.
    """

    num_new: int
    places: Tensor
    seen: AttentionBatch
    seen_by_all: AttentionBatch
    among: AttentionBatch | None = None
    prompts: AttentionBatch | None = None

    @classmethod
    def of(cls, ops: Backend, length: int, step: StepContext) -> "_SoftPrompts":
        tables, new, device = step.rows.tables, step.rows.beginning, step.positions.device
        assert tables is not None
        assert new is not None
        places = step.positions[:0]
        if len(new):
            places = torch.from_numpy((tables[new].astype(np.int64) * length + np.arange(length)).ravel()).to(device)

        def whole(
            tables: np.ndarray, lengths: np.ndarray, block_size: int, there: DeviceRows | None = None
        ) -> AttentionBatch:
            """Builds a batch of single queries, each of which sees all keys of its row."""
            return ops.attention_batch(
                np.ones_like(lengths), lengths, tables, places, block_size=block_size, there=there
            )  # fmt: skip

        if len(step.positions) == len(tables):
            of_tokens, there = tables, _slots_there(step, length)
        else:
            of_tokens, there = np.repeat(tables, step.rows.starts.diff().numpy(), axis=0), None
        seen_by_all = seen = whole(of_tokens, np.full(len(of_tokens), length), length, there)
        if step.wanted is not None:
            wanted = of_tokens[step.wanted.tokens.cpu().numpy()]
            seen = whole(wanted, np.full(len(wanted), length), length)
        if not len(new):
            return cls(0, places, seen, seen_by_all)
        lengths = np.full(len(new), length)
        spans = np.stack((np.zeros_like(lengths), lengths), axis=1)
        among = ops.attention_batch(lengths, lengths, tables[new], places, block_size=length, prefix_spans=spans)
        text = step.attention[step.caches[0].group]
        assert text.prefix_spans is not None, "a prompt is a span"
        prompts = whole(
            np.repeat(text.block_tables[new], length, axis=0),
            np.repeat(text.prefix_spans[new, 1], length),
            text.block_size,
        )
        return cls(len(new), places, seen, seen_by_all, among, prompts)


def _slots_there(step: StepContext, length: int) -> DeviceRows:
    """The rows of one token on the device, each with the `length` keys in its slot."""
    slots = step.rows.slots.clamp(min=0)  # padding reads what another has
    starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    return DeviceRows(starts, torch.full_like(slots, length, dtype=torch.int32), slots.int()[:, None], 1, length)


class _Attention:
    """Attention to the text and to the soft prompt.

    Attributes:
        kv: the cached keys and values of a sequence's text.
        state: the cached keys and values of its soft prompt.
    """

    def __init__(self, spec: ModelSpec, context: ModelContext, place: LayerPlace, biases: _Biases, length: int) -> None:
        size, heads, self._head_dim = spec.hidden_size, spec.num_attention_heads, size_of(spec, "dim_head")
        num_heads, name = context.share(heads, "attention heads"), f"{place.name}.self_attn"
        inner = heads * self._head_dim
        shard = context.shard(0, inner, "query outputs")
        parts = [LinearPart(f"{name}.{part}_proj", inner, shard) for part in "qkv"]
        self._ops, self._place, self._biases = context.ops, place, biases
        self._plain = AttentionForm(self._head_dim**-0.5)
        self._form = own_form(context, self._plain._replace(distance_bias=biases.by_distance))
        self._no_rotation = torch.empty(1, 1, 0, dtype=context.dtype, device=context.device)
        self._project = ColumnLinear(context, parts, size)
        self._output = RowLinear(context, f"{name}.o_proj", inner, size, shard._replace(dim=1))
        self.kv = LayerKV(num_heads, self._head_dim, sees_prompt=True)
        page = context.ops.kv_cache_shape(1, length, num_heads, self._head_dim, context.dtype)[1:]
        self.state = LayerState((page,), (context.dtype,), num_first_rows=length)
        self.activation_size = 6 * num_heads * self._head_dim

    def __call__(self, x: Tensor, soft: _SoftPrompts, step: StepContext) -> Tensor:
        """Maps `x` [num_tokens + new soft tokens, hidden] to the same rows, or to those that `rows_of` selects."""
        cache = step.caches[self._place.number]
        (kept,) = step.states[self._place.number]
        text, num_tokens = step.attention[cache.group], len(step.positions)
        heads = self._project(x).unflatten(1, (-1, self._head_dim))
        q = self._store(heads[:num_tokens], cache.pages, text.slot_mapping)
        parts = [self._store(heads[num_tokens:], kept, soft.places)] if soft.num_new else []
        if self._place.is_last:
            if step.wanted is not None:
                text = step.wanted.attention[cache.group]
                q = self._ops.take_rows(q.flatten(1), step.wanted.tokens).view(-1, *q.shape[1:])
            return self._output(
                self._attend(q, (cache.pages, text), (kept, soft.seen), self._biases.to_soft).flatten(1)
            )
        out = self._attend(q, (cache.pages, text), (kept, soft.seen_by_all), self._biases.to_soft)
        if soft.among is not None and soft.prompts is not None:
            own = self._attend(parts[0], (kept, soft.among), (cache.pages, soft.prompts), self._biases.to_text)
            out = torch.cat((out, own))
        return self._output(out.flatten(1))

    def rows_of(self, x: Tensor, step: StepContext) -> Tensor:
        """Selects the rows of `x` with an output: all, or in the last layer those of the wanted tokens."""
        if not self._place.is_last:
            return x
        return x[: len(step.positions)] if step.wanted is None else self._ops.take_rows(x, step.wanted.tokens)

    def _store(self, heads: Tensor, pages: Tensor, places: Tensor) -> Tensor:
        return self._ops.rotate_and_store(NewHeads(heads, self._no_rotation, self._no_rotation, pages, places))

    def _attend(
        self, q: Tensor, own: tuple[Tensor, AttentionBatch], other: tuple[Tensor, AttentionBatch], bias: Tensor
    ) -> Tensor:
        """Attends from `q` to its own segment, with biases by distance, and to the other, with `bias` [num_heads]."""
        out, total = self._ops.partial_attention(q, *other, self._plain)
        return self._ops.merge_attention(
            [self._ops.partial_attention(q, *own, self._form), (out, total + bias)]
        )  # fmt: skip


class _Layer:
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        place: LayerPlace,
        style: NormStyle,
        biases: _Biases,
        length: int,
    ) -> None:
        size = spec.hidden_size
        self._input_norm = RMSNorm(context, f"{place.name}.input_layernorm", size, style)
        self.attention = _Attention(spec, context, place, biases, length)
        self._post_attention_norm = RMSNorm(context, f"{place.name}.post_attention_layernorm", size, style)
        self.mlp = GatedMLP(context, f"{place.name}.mlp", size, size_of(spec, "dim_ff"), "gelu")
        self._ops = context.ops

    def __call__(self, x: Tensor, soft: _SoftPrompts, step: StepContext) -> Tensor:
        attended = self.attention(self._input_norm(x), soft, step)
        normed, x = self._post_attention_norm.add(attended, self.attention.rows_of(x, step))
        return self._ops.add(self.mlp(normed), x)
