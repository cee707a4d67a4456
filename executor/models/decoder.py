"""The decoder that the Llama family shares: a pre-norm transformer with rotary positions and gated feed-forward.

A family's file builds its layers and says how they differ; what is here, the families have in common, the checkpoint's
names included.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import Attention, AttentionShape, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import RMSNorm
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import LanguageModelHead, VocabEmbedding, VocabularyWeight


class DecoderLayer(Protocol):
    """One layer of a `Decoder`."""

    attention: Attention

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """Takes and returns (what the last block added, sum of all before it): the next norm adds the two.

        `x` and `residual` are [num_tokens, hidden]; the first layer has no residual, the last layer returns those of
        the wanted tokens only.
        """
        ...


class PreNormLayer:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x, residual = self.post_attention_norm.add(self.attention(x, step), self.attention.outputs_of(residual, step))
        return self.mlp(x), residual


class Decoder:
    """Embedding, layers, final norm and head. Implements `quire.executor.models.base.Model`."""

    def __init__(self, spec: ModelSpec, context: ModelContext, layers: Sequence[DecoderLayer]) -> None:
        embedding = VocabularyWeight(context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._embed = VocabEmbedding(context, embedding)
        self._layers = layers
        self._norm = RMSNorm(context, "model.norm", spec.hidden_size, rms_norm_eps(spec))
        if not spec.hf_config.get("tie_word_embeddings", False):
            embedding = VocabularyWeight(context, "lm_head.weight", spec.vocab_size, spec.hidden_size)
        self._head = LanguageModelHead(context, embedding)

        self.kv_layers = [layer.attention.kv for layer in layers]

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """See `Model.forward`."""
        x, residual = self._embed(token_ids, step), None
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self._head(hidden)


def pre_norm_layers(
    spec: ModelSpec,
    context: ModelContext,
    make_attention: Callable[[LayerPlace], Attention],
    *,
    mlp_bias: bool = False,
) -> list[PreNormLayer]:
    """All layers of a model; `make_attention` builds the attention of one."""
    size, eps = spec.hidden_size, rms_norm_eps(spec)
    return [
        PreNormLayer(
            RMSNorm(context, f"{place.name}.input_layernorm", size, eps),
            make_attention(place),
            RMSNorm(context, f"{place.name}.post_attention_layernorm", size, eps),
            GatedMLP(context, f"{place.name}.mlp", size, spec.hf_config["intermediate_size"], bias=mlp_bias),
        )
        for place in layer_places(spec)
    ]


def layer_places(spec: ModelSpec) -> list[LayerPlace]:
    """The places of all layers, in order."""
    return [LayerPlace(index, is_last=index == spec.num_layers - 1) for index in range(spec.num_layers)]


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """The sizes that a family's attention layers share."""
    return AttentionShape(spec.hidden_size, spec.num_attention_heads, spec.num_kv_heads, spec.head_dim)


def rms_norm_eps(spec: ModelSpec) -> float:
    """The families' common default where config.json does not say."""
    return spec.hf_config.get("rms_norm_eps", 1e-6)


def check_supported(spec: ModelSpec) -> None:
    """Refuses a checkpoint that these layers would misread.

    Raises:
        ModelLoadError: another activation than silu, or a config.json that lacks a size.
    """
    config = spec.hf_config
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(
            f"{spec.name}: hidden_act {activation!r} is not supported in {spec.architecture}; only silu."
        )
    for name in ("intermediate_size", "max_position_embeddings"):
        if not isinstance(config.get(name), int):
            raise ModelLoadError(f"config.json of {spec.name} lacks {name!r}.")


def sliding_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Each layer's window, as Qwen checkpoints write it: `layer_types`, or every layer from `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return [window if index >= first else None for index in range(num_layers)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) < num_layers:
        raise ModelLoadError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of {num_layers} layers, "
            f"got {len(types)} entries{f' with {unknown}' if unknown else ''}."
        )
    return [window if types[index] == "sliding_attention" else None for index in range(num_layers)]
