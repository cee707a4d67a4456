"""The decoder that the Llama family shares: a pre-norm transformer with rotary positions and gated feed-forward.

A family's file says how its layers differ; what is here, they have in common, the checkpoint's names included.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import Attention, AttentionShape, Wanted
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import RMSNorm
from quire.executor.layers.rotary import RotaryEmbedding
from quire.executor.layers.vocabulary import LanguageModelHead, VocabEmbedding, VocabularyWeight
from quire.executor.models.base import GivenRows
from quire.ops.backend import AttentionBatch, Backend


class DecoderLayer:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self, ops: Backend, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: GatedMLP
    ) -> None:
        self._ops = ops
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: AttentionBatch,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns (what the last block added, sum of all before it): the next norm adds the two.

        With `wanted`, returns those of the wanted tokens only.
        """
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, *rotation, kv_cache, batch, wanted)
        if wanted is not None:
            residual = self._ops.take_rows(residual, wanted.tokens)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual


class Decoder:
    """Embedding, layers, final norm and head. Implements `quire.executor.models.base.Model`."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        make_attention: Callable[[str, int], Attention],
        *,
        mlp_bias: bool = False,
    ) -> None:
        """`make_attention(name, index)` builds the attention of one layer."""
        config = spec.hf_config
        check_supported(spec)
        eps = rms_norm_eps(spec)

        intermediate_size = config["intermediate_size"]
        embedding = VocabularyWeight(context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._embed = VocabEmbedding(context, embedding)
        self._rotary = RotaryEmbedding(context, config, spec.head_dim)
        self._layers = [
            DecoderLayer(
                context.ops,
                RMSNorm(context, f"model.layers.{index}.input_layernorm", spec.hidden_size, eps),
                make_attention(f"model.layers.{index}.self_attn", index),
                RMSNorm(context, f"model.layers.{index}.post_attention_layernorm", spec.hidden_size, eps),
                GatedMLP(context, f"model.layers.{index}.mlp", spec.hidden_size, intermediate_size, bias=mlp_bias),
            )
            for index in range(spec.num_layers)
        ]
        self._norm = RMSNorm(context, "model.norm", spec.hidden_size, eps)
        if not config.get("tie_word_embeddings", False):
            embedding = VocabularyWeight(context, "lm_head.weight", spec.vocab_size, spec.hidden_size)
        self._head = LanguageModelHead(context, embedding)

        self.num_layers = spec.num_layers
        self.num_kv_heads = self._layers[0].attention.num_kv_heads
        self.head_dim = spec.head_dim

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        batch: AttentionBatch,
        given: GivenRows | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """See `Model.forward`."""
        rotation = self._rotary(positions)
        x, residual = self._embed(token_ids), None
        if given is not None:
            x[given.places] = given.rows
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            # No layer after the last one attends to its outputs.
            outputs = wanted if layer is self._layers[-1] else None
            x, residual = layer(x, residual, rotation, kv_cache, batch, outputs)
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self._head(hidden)


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """The sizes that a family's attention layers share."""
    return AttentionShape(spec.hidden_size, spec.num_attention_heads, spec.num_kv_heads, spec.head_dim)


def rms_norm_eps(spec: ModelSpec) -> float:
    """The families' common default where config.json does not say."""
    return spec.hf_config.get("rms_norm_eps", 1e-6)


def check_supported(spec: ModelSpec) -> None:
    """Refuses a checkpoint that these layers would misread.

    Raises:
        ModelLoadError: another activation than silu, quantised weights, or a config.json that lacks a size.
    """
    config = spec.hf_config
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(
            f"{spec.name}: hidden_act {activation!r} is not supported in {spec.architecture}; only silu."
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(
            f"{spec.name} is quantised ({method}), which is not supported; use the unquantised checkpoint."
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
