"""The parts that decoders share: embedding, sequence of layers, final norm and head; and the Llama family's layer.

A family's file combines these parts and defines how its layers differ. The names of weights are common to all families
here.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import AttentionShape, LayerPlace
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm, NormStyle, RMSNorm
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import (
    AbsentEmbedding,
    AbsentHead,
    Embedding,
    Head,
    LanguageModelHead,
    VocabEmbedding,
    VocabularyWeight,
    stored_ends,
    untied,
)
from quire.executor.weights.readers import MissingTensorError
from quire.ops.activations import PlainActivation


class SettingError(ModelLoadError):
    """A setting of config.json that the family's file here does not support. Its Transformers class may."""


class Mixer(Protocol):
    """A layer that mixes the tokens of a sequence: a `SelfAttention`, a `RecurrentLayer`, or several side by side."""

    activation_size: int

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Maps `x` [num_tokens, hidden] to [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        ...

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        """Selects the `rows` [num_tokens, size] of tokens with an output."""
        ...


class SelfAttention(Mixer, Protocol):
    """`Attention`, or another layer that reads and writes the step's pages."""

    @property
    def kv(self) -> AttentionKV | None:
        """The keys and values that the layer caches; None: it reads those of another layer."""
        ...


class FeedForward(Protocol):
    """`GatedMLP`, or another layer that computes each token by itself."""

    activation_size: int

    def __call__(self, x: Tensor) -> Tensor: ...


MLPMaker = Callable[[LayerPlace], FeedForward]
"""Builds the feed-forward block of one layer."""


class DecoderLayer(Protocol):
    """One layer of a `Decoder`."""

    @property
    def attention(self) -> SelfAttention:
        """The block that mixes tokens."""
        ...

    @property
    def mlp(self) -> FeedForward:
        """The block that computes each token by itself."""
        ...

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """Takes and returns (output of the last block, sum of all outputs before it); the next norm adds the two.

        `x` and `residual` are [num_tokens, hidden]; the first layer has no residual, the last layer returns those of
        the wanted tokens only.
        """
        ...


class Decoder:
    """Embedding, layers, final norm and head. Implements `quire.executor.models.base.StagedModel`."""

    def __init__(self, embed: Embedding, layers: Sequence[DecoderLayer], norm: Norm, head: Head) -> None:
        self.embed = embed
        self._layers = layers
        self._norm = norm
        self.head = head
        self.kv_layers = [kv for layer in layers if (kv := layer.attention.kv) is not None]
        self.state_layers: Sequence[LayerState] = ()
        self.num_layer_outputs = len(layers)
        self.activation_size = max(layer.attention.activation_size + layer.mlp.activation_size for layer in layers)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x, residual = enter_stage(self.embed, token_ids, step)
        for index, layer in enumerate(self._layers):
            x, residual = layer(x, residual, step)
            if step.taps is not None:
                step.taps.see(index, x, residual)
        return leave_stage(self._norm, x, residual, step)

    def handover_size(self, hidden_size: int) -> int:
        """Counts output and residual."""
        return 2 * hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def enter_stage(embed: Embedding, token_ids: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
    """Returns the input of a stage's first layer (see `DecoderLayer`): embeddings, or the previous stage's message."""
    if step.received is None:
        return embed(token_ids, step), None
    x, residual = step.received.view(2, len(token_ids), -1)
    return x, residual


def leave_stage(norm: Norm, x: Tensor, residual: Tensor | None, step: StepContext) -> Tensor:
    """Returns the result of a stage after its last layer: hidden states, or the message for the next stage."""
    assert residual is not None
    if step.hands_over:
        return hand_over(x, residual)
    return norm.add(x, residual)[0]


def hand_over(*tensors: Tensor) -> Tensor:
    """Packs `tensors`, each [num_tokens, ...] or [..., num_tokens, size], into one message, one after the other."""
    return torch.cat([tensor.flatten() for tensor in tensors])


class PreNormLayer:
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self, input_norm: RMSNorm, attention: SelfAttention, post_attention_norm: RMSNorm, mlp: FeedForward
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm.add(x, residual)
        x, residual = self.post_attention_norm.add(self.attention(x, step), self.attention.outputs_of(residual, step))
        return self.mlp(x), residual


class PreNormDecoder(Decoder):
    """The Llama family's decoder: `PreNormLayer`s that differ in their blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        make_attention: Callable[[LayerPlace], SelfAttention],
        make_mlp: MLPMaker | None = None,
    ) -> None:
        """Takes makers that build the blocks of one layer; without `make_mlp`, the second is a `GatedMLP`."""
        size, style = spec.hidden_size, norm_style(spec)
        make_mlp = make_mlp or mlp_maker(spec, context)
        layers = [
            PreNormLayer(
                RMSNorm(context, f"{place.name}.input_layernorm", size, style),
                make_attention(place),
                RMSNorm(context, f"{place.name}.post_attention_layernorm", size, style),
                make_mlp(place),
            )
            for place in layer_places(spec, context)
        ]
        embed, head = vocabulary_ends(spec, context, is_tied=spec.hf_config.get("tie_word_embeddings", False))
        super().__init__(embed, layers, RMSNorm(context, "model.norm", size, style), head)


def mlp_maker(spec: ModelSpec, context: ModelContext, *, bias: bool = False) -> MLPMaker:
    """Builds the dense feed-forward block of a layer, as config.json describes it."""
    size, activation = size_of(spec, "intermediate_size"), activation_of(spec, "hidden_act")
    return lambda place: GatedMLP(context, f"{place.name}.mlp", spec.hidden_size, size, activation, bias=bias)


def vocabulary_ends(
    spec: ModelSpec,
    context: ModelContext,
    *,
    is_tied: bool,
    scale: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    head_bias: bool = False,
) -> tuple[Embedding, Head]:
    """Builds a model's embedding, which multiplies by `scale`, and its head.

    `is_tied` is True if the two share a weight, unless the checkpoint shows otherwise: see `stored_ends`.
    `logit_scale`, `softcap` and `head_bias` are the head's. A pipeline stage reads only the end that it has.

    Raises:
        MissingTensorError: the checkpoint has one of two weights that are not tied.
    """
    size, bias = (spec.vocab_size, spec.hidden_size), "lm_head.bias" if head_bias else None
    embed_name, head_name = "model.embed_tokens", "lm_head"
    if is_tied:
        embed_name, head_name = stored_ends(context, embed_name, head_name)
    is_shared = embed_name == head_name and context.generates
    try:
        weight = VocabularyWeight(context, f"{embed_name}.weight", *size, bias=bias, is_shared=is_shared)
        embed = (
            VocabEmbedding(context, weight, scale, takes_adapters=True) if context.is_first_stage else AbsentEmbedding()
        )
        if context.layers.stop < spec.num_layers or not context.generates:
            return embed, AbsentHead()
        if not is_shared:
            weight = VocabularyWeight(context, f"{head_name}.weight", *size, bias=bias)
        return embed, LanguageModelHead(context, weight, scale=logit_scale, softcap=softcap)
    except MissingTensorError as error:
        raise error if is_tied else untied(context, embed_name, head_name, error) from None


def layer_places(spec: ModelSpec, context: ModelContext) -> list[LayerPlace]:
    """Lists the places of the layers that this rank builds, in order."""
    return [
        LayerPlace(index, number, is_last=index == spec.num_layers - 1) for number, index in enumerate(context.layers)
    ]


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """Returns the sizes that a model's attention layers share."""
    return AttentionShape(spec.hidden_size, spec.num_attention_heads, spec.num_kv_heads, spec.head_dim)


def norm_style(spec: ModelSpec) -> NormStyle:
    """Returns plain norms, with the families' common default where config.json has no eps."""
    return NormStyle(spec.hf_config.get("rms_norm_eps", 1e-6))


def activation_of(spec: ModelSpec, field: str, default: str = "silu") -> PlainActivation:
    """Returns the activation that config.json names in `field`, or else the family's `default`.

    Raises:
        SettingError: an activation that no layer here has.
    """
    known: dict[str, PlainActivation] = {
        "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2",
    }  # fmt: skip
    name = spec.hf_config.get(field, default)
    if name not in known:
        raise SettingError(
            f"{spec.name}: {field} {name!r} is not supported in {spec.architecture}; only {', '.join(known)}."
        )
    return known[name]


def layer_windows(types: Sequence[str], window: int | None, num_layers: int) -> list[int | None]:
    """Returns each layer's window, from config.json's `layer_types` and `sliding_window`.

    Raises:
        ModelLoadError: other types than full_attention and sliding_attention, or too few of them.
    """
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) < num_layers:
        raise ModelLoadError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of {num_layers} layers, "
            f"got {len(types)} entries{f' with {unknown}' if unknown else ''}."
        )
    return [window if types[index] == "sliding_attention" else None for index in range(num_layers)]


def size_of(spec: ModelSpec, *fields: str) -> int:
    """Reads a size that config.json must have, in one of `fields`.

    Raises:
        ModelLoadError: it has none.
    """
    sizes = (spec.hf_config.get(field) for field in fields)
    size = next((size for size in sizes if isinstance(size, int)), None)
    if size is None:
        raise ModelLoadError(f"config.json of {spec.name} lacks {fields[0]!r}.")
    return size


SIZES = ("intermediate_size", "max_position_embeddings")
"""Fields of config.json that a model reads, unless its class names others as `SIZES`."""


def check_supported(spec: ModelSpec, sizes: Sequence[str] = SIZES) -> None:
    """Refuses a checkpoint that no family here can read.

    Raises:
        ModelLoadError: a config.json that lacks one of `sizes`.
    """
    for name in sizes:
        size_of(spec, name)
