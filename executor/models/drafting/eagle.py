"""EAGLE (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840): a few layers that continue a model's hidden states.

Checkpoints are those of the authors and of the package speculators. Their layers are Llama's or Qwen3's, and the
tensors show which: biases of projections, and norms of queries and keys.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding, Head, LanguageModelHead, VocabEmbedding, VocabularyWeight
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import FeedForward, attention_shape, mlp_maker, norm_style
from quire.executor.models.drafting.parts import ends_of, has_tensor, places_of
from quire.executor.weights.renamed import RenamedWeights


class EagleHeads:
    """EAGLE: a layer reads the target's last hidden state, and the embedding of the next token. Implements
    `DraftHeads`.

    The first layer has no norm of its input, and nothing follows the last one but the target's head.
    """

    target_layers: Sequence[int] = ()
    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        size, style = spec.hidden_size, norm_style(spec)
        self._ops = context.ops
        self._embed, self._head = _ends(spec, context)
        self._join = ColumnLinear(context, [whole("fc", size)], 2 * size, bias=has_tensor(context, "fc.bias"))
        rotary, make_mlp = RotaryEmbedding(context, spec.hf_config, spec.head_dim), mlp_maker(spec, context)
        self._layers = [
            ResidualLayer(
                context.ops,
                _attention(spec, context, place, attention_shape(spec), rotary),
                make_mlp(place),
                before_attention=RMSNorm(context, f"{place.name}.input_layernorm", size, style)
                if has_tensor(context, f"{place.name}.input_layernorm.weight")
                else None,
                before_mlp=RMSNorm(context, f"{place.name}.post_attention_layernorm", size, style),
            )
            for place in places_of(spec)
        ]
        self.kv_layers = [layer.attention.kv for layer in self._layers]
        self.activation_size = 2 * size + max(layer.activation_size for layer in self._layers)

    def read_target(self, states: Tensor) -> Tensor:
        return states

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        assert step.target_states is not None
        x = self._join(self._ops.join([self._embed(token_ids, step), step.target_states]))
        residual: Tensor | None = None
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        assert residual is not None
        return self._ops.add(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class Eagle3Heads:
    """EAGLE-3: the first layer reads the outputs of several layers of the target, which one projection joins, beside
    the embedding of the next token. Implements `DraftHeads`.

    Its head may know a part of the vocabulary alone.
    """

    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, style = spec.hf_config, spec.hidden_size, norm_style(spec)
        if has_tensor(context, "midlayer.self_attn.q_proj.weight"):  # as the authors call the only layer
            context = dataclasses.replace(
                context, weights=RenamedWeights(context.weights, {"model.layers.0.": "midlayer."})
            )
        self.target_layers = tuple(config["target_layers"])
        self._ops = context.ops
        self._embed, self._head = _ends(spec, context)
        num_states = len(self.target_layers) or 1
        states_size = config.get("target_hidden_size") or size
        self._join = ColumnLinear(
            context, [whole("fc", size)], num_states * states_size, bias=has_tensor(context, "fc.bias")
        )
        self._states_norm = None
        if config.get("norm_before_fc"):
            self._states_norm = RMSNorm(context, "input_norm", num_states * states_size, style)
        self._state_norms = []
        if config.get("fc_norm"):
            self._state_norms = [
                RMSNorm(context, f"fc_norm.{index}", states_size, style) for index in range(num_states)
            ]
        rotary, make_mlp = RotaryEmbedding(context, config, spec.head_dim), mlp_maker(spec, context)
        first, *others = places_of(spec)
        wide = dataclasses.replace(attention_shape(spec), hidden_size=2 * size, output_size=size)
        self._first = _FirstLayer(
            context,
            first,
            size,
            _attention(spec, context, first, wide, rotary),
            make_mlp(first),
            style,
            adds_normed=bool(config.get("norm_before_residual")),
        )
        self._others = [
            ResidualLayer(
                context.ops,
                _attention(spec, context, place, attention_shape(spec), rotary),
                make_mlp(place),
                before_attention=RMSNorm(context, f"{place.name}.input_layernorm", size, style),
                before_mlp=RMSNorm(context, f"{place.name}.post_attention_layernorm", size, style),
            )
            for place in others
        ]
        self._norm = RMSNorm(context, "model.norm", size, style)
        self._hands_on_normed = bool(config.get("norm_output"))
        self.kv_layers = [self._first.attention.kv, *(layer.attention.kv for layer in self._others)]
        largest = max(self._first.activation_size, *(layer.activation_size for layer in self._others), 0)
        self.activation_size = num_states * states_size + 4 * size + largest

    def read_target(self, states: Tensor) -> Tensor:
        if self._states_norm is not None:
            states = self._states_norm(states)
        if self._state_norms:
            parts = states.chunk(len(self._state_norms), -1)
            states = self._ops.join(
                [norm(part.contiguous()) for norm, part in zip(self._state_norms, parts, strict=True)]
            )
        return self._join(states)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        assert step.target_states is not None
        x, residual = self._first(self._embed(token_ids, step), step.target_states, step)
        for layer in self._others:
            x, residual = layer(x, residual, step)
        normed, total = self._norm.add(x, residual)
        return normed if self._hands_on_normed else total

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden if self._hands_on_normed else self._norm(hidden))


class _FirstLayer:
    """Llama's layer, whose attention reads an embedding and a hidden state side by side, each after its norm.

    The residual stream is the hidden state alone: as it comes, or, if it `adds_normed`, after its norm.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        size: int,
        attention: Attention,
        mlp: FeedForward,
        style: NormStyle,
        *,
        adds_normed: bool,
    ) -> None:
        self.attention = attention
        self.activation_size = attention.activation_size + mlp.activation_size
        self._ops = context.ops
        self._mlp = mlp
        self._token_norm = RMSNorm(context, f"{place.name}.input_layernorm", size, style)
        self._hidden_norm = RMSNorm(context, f"{place.name}.hidden_norm", size, style)
        self._mlp_norm = RMSNorm(context, f"{place.name}.post_attention_layernorm", size, style)
        self._adds_normed = adds_normed

    def __call__(self, embedded: Tensor, hidden: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        normed = self._hidden_norm(hidden)
        x = self.attention(self._ops.join([self._token_norm(embedded), normed]), step)
        residual = self.attention.outputs_of(normed if self._adds_normed else hidden, step)
        x, residual = self._mlp_norm.add(x, residual)
        return self._mlp(x), residual


class PartialHead:
    """A head that knows some tokens of the target's vocabulary: others have no chance.

    Args:
        offsets: [draft vocabulary] int64; the difference of a token's ids in the target's and in this vocabulary.
        vocab_size: of the target.
    """

    def __init__(self, head: Head, offsets: Tensor, vocab_size: int) -> None:
        self._head = head
        self._ids = torch.arange(len(offsets), device=offsets.device) + offsets
        self._vocab_size = vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        everything = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return everything.index_copy_(1, self._ids, logits)


def _attention(
    spec: ModelSpec, context: ModelContext, place: LayerPlace, shape: AttentionShape, rotary: RotaryEmbedding
) -> Attention:
    name = f"{place.name}.self_attn"
    return Attention(
        context, place, shape, rotary,
        qkv_bias=has_tensor(context, f"{name}.q_proj.bias"), output_bias=has_tensor(context, f"{name}.o_proj.bias"),
        qk_norm=norm_style(spec) if has_tensor(context, f"{name}.q_norm.weight") else None,
    )  # fmt: skip


def _ends(spec: ModelSpec, context: ModelContext) -> tuple[Embedding, Head]:
    """Returns the checkpoint's own embedding and head, or where it has none, the target's."""
    embed: Embedding | None = None
    head: Head | None = None
    if has_tensor(context, "model.embed_tokens.weight"):
        weight = VocabularyWeight(context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        embed = VocabEmbedding(context, weight)
    if has_tensor(context, "lm_head.weight"):
        head = _own_head(spec, context)
    if embed is None or head is None:
        target_embed, target_head = ends_of(spec, context)
        embed, head = embed or target_embed, head or target_head
    return embed, head


def _own_head(spec: ModelSpec, context: ModelContext) -> Head:
    """Reads the head and the ids of its tokens.

    Raises:
        ModelLoadError: the head knows a part of the vocabulary, and nothing says which.
    """
    size = spec.hf_config.get("draft_vocab_size") or spec.vocab_size
    head = LanguageModelHead(context, VocabularyWeight(context, "lm_head.weight", size, spec.hidden_size))
    if has_tensor(context, "d2t"):
        return PartialHead(head, context.read("d2t", (size,), dtype=torch.int64), spec.vocab_size)
    if size < spec.vocab_size:
        raise ModelLoadError(
            f"{spec.name}: the head has {size} of {spec.vocab_size} tokens, and the checkpoint lacks d2t, which would "
            "say which ones. Download it again."
        )
    return head
