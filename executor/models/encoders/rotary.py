"""Encoders with rotary positions: ModernBERT, EuroBERT, and BERT's kin without learned positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quire.core.config.pooling import SequencePooling
from quire.core.config.resolved import ModelSpec
from quire.executor.layers.adapters import LayerAdapters
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear
from quire.executor.layers.mlp import MLP, GatedMLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import FeedForward, activation_of, size_of
from quire.executor.models.encoders.encoder import (
    Encoder,
    EncoderEmbedding,
    PostNormLayer,
    PreNormLayer,
    encoder_shape,
    projection,
    renamed,
)
from quire.executor.models.encoders.heads import (
    WORDS,
    DenseForm,
    HeadForms,
    labels_sequences,
    read_heads,
    read_words,
)
from quire.executor.weights.rearranged import Piece, fused
from quire.ops.backend import AttentionForm

_MODERN_ROTATIONS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 1e4)}
TYPES = "types"
"""The models' name for the table of segments."""


class ModernBertModel(Encoder):
    """ModernBERT (arXiv:2412.13663): norms before blocks, and windows in most layers, with rotations of their own."""

    SIZES = ("intermediate_size", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, inner = spec.hf_config, spec.hidden_size, size_of(spec, "intermediate_size")
        q, k, v = fused("attn.Wqkv", size, size, size)
        gate, up = fused("mlp.Wi", inner, inner)
        pieces = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attn.Wo"),
            "attention_norm": Piece("attn_norm"),
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": Piece("mlp.Wo"),
            "mlp_norm": Piece("mlp_norm"),
        }  # fmt: skip
        ends = {WORDS: "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "norm": "final_norm"}
        context = renamed(context, ("model",), "layers.{}", pieces, ends)
        style = NormStyle(config.get("norm_eps", 1e-5), is_centred=True, has_bias=config.get("norm_bias", False))
        forms = self._heads(spec)
        words = read_words(spec, context, forms, size)
        types = self._layer_types(spec)
        rotaries = {kind: RotaryEmbedding(context, _rotation(config, kind), spec.head_dim) for kind in set(types)}
        # The window is half of the tokens on each side, and the token itself.
        window = config.get("local_attention", 128) // 2 + 1
        limits = {"full_attention": None, "sliding_attention": window}

        def norm(name: str) -> Norm:
            return style.layer(context, name, size)

        def layer(index: int, kind: str) -> PreNormLayer:
            name, bias = f"model.layers.{index}", config.get("attention_bias", False)
            attention = SequenceAttention(
                context, f"{name}.self_attn", encoder_shape(spec), rotaries[kind],
                bias=bias, output_bias=bias, form=AttentionForm(spec.head_dim**-0.5, limits[kind]),
            )  # fmt: skip
            activation = activation_of(spec, "hidden_activation", "gelu")
            mlp = GatedMLP(context, f"{name}.mlp", size, inner, activation, bias=config.get("mlp_bias", False))
            before = norm(f"{name}.attention_norm") if index else None  # the embedding's norm is the first layer's
            return PreNormLayer(context.ops, before, attention, norm(f"{name}.mlp_norm"), mlp)

        super().__init__(
            EncoderEmbedding(context, words, norm=norm("embedding_norm")),
            [layer(index, kind) for index, kind in enumerate(types)],
            read_heads(spec, context, words, forms, style),
            norm("norm"),
        )

    @staticmethod
    def _layer_types(spec: ModelSpec) -> list[str]:
        every = spec.hf_config.get("global_attn_every_n_layers", 3)
        kinds = ["sliding_attention" if index % every else "full_attention" for index in range(spec.num_layers)]
        return spec.hf_config.get("layer_types") or kinds

    @staticmethod
    def _heads(spec: ModelSpec) -> HeadForms:
        bias, activation = spec.hf_config.get("classifier_bias", False), _activation_of_head(spec)
        dense = DenseForm("head.dense", activation, "head.norm", has_bias=bias)
        has_bias = spec.hf_config.get("decoder_bias", True)
        return HeadForms(dense, "classifier", dense, dense, "decoder", "decoder.bias" if has_bias else None)


def _rotation(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the fields of config.json for the rotation of one type of layer."""
    stated = (config.get("rope_parameters") or {}).get(kind) or {}
    field, default = _MODERN_ROTATIONS[kind]
    scaling = config.get("rope_scaling") or {}
    theta = config.get(field, default)
    return {**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling, **stated}}


def _activation_of_head(spec: ModelSpec) -> Any:
    return activation_of(spec, "classifier_activation", "gelu")


class EuroBertModel(Encoder):
    """EuroBERT (arXiv:2503.05500): Llama's layers, with attention in both directions."""

    SIZES = ("intermediate_size", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        pieces = {"attention_norm": Piece("input_layernorm"), "mlp_norm": Piece("post_attention_layernorm")}
        context = renamed(context, ("model",), "layers.{}", pieces, {WORDS: "embed_tokens", "norm": "norm"})
        style = NormStyle(config.get("rms_norm_eps", 1e-5))
        inner, activation = size_of(spec, "intermediate_size"), activation_of(spec, "hidden_act")
        bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
        forms = HeadForms(DenseForm("dense", "gelu"), vocabulary="lm_head")
        words = read_words(spec, context, forms, size)
        rotary = RotaryEmbedding(context, config, spec.head_dim)

        def norm(name: str) -> Norm:
            return style.layer(context, name, size)

        def layer(name: str) -> PreNormLayer:
            attention = SequenceAttention(
                context, f"{name}.self_attn", encoder_shape(spec), rotary, bias=bias, output_bias=bias
            )
            mlp = GatedMLP(context, f"{name}.mlp", size, inner, activation, bias=mlp_bias)
            return PreNormLayer(
                context.ops, norm(f"{name}.attention_norm"), attention, norm(f"{name}.mlp_norm"), mlp
            )  # fmt: skip

        last_norm = norm("norm")
        last: Norm | _Activated = last_norm
        self.label_poolings: Sequence[SequencePooling] = ()
        if labels_sequences(spec) and config.get("classifier_pooling", "late") == "late":
            # The labels of a text are the mean of those of its tokens: the mean of what their last layer reads.
            last = _Activated(last_norm, projection(context, "dense", size, size, bias=True))
            forms, self.label_poolings = forms._replace(dense=None), ("MEAN",)
        super().__init__(
            EncoderEmbedding(context, words),
            [layer(f"model.layers.{index}") for index in range(spec.num_layers)],
            read_heads(spec, context, words, forms, style),
            last,
        )


class _Activated:
    """A norm, and behind it a linear layer and its activation."""

    def __init__(self, norm: Norm, linear: ColumnLinear) -> None:
        self._norm = norm
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return F.gelu(self._linear(self._norm(x)))


@dataclass(frozen=True)
class RotaryForm:
    """The differences between encoders that are BERT with rotary positions.

    Attributes:
        prefixes: of names in checkpoints with a head; one of these.
        bias: the projections to queries, keys and values, and that of the outputs, have biases.
        is_gated: the feed-forward block is gated.
        down_bias: its last layer has a bias; without gates, both layers have one.
        theta: the base of the rotation where config.json has none.
    """

    prefixes: tuple[str, ...]
    layer: str
    bias: bool
    is_gated: bool
    down_bias: bool
    eps: float
    theta: float
    heads: HeadForms


class RotaryBertModel(Encoder):
    """BERT whose queries and keys are rotated instead of learned positions."""

    FORM: RotaryForm
    SIZES: tuple[str, ...] = ("intermediate_size", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        form, config, size = self.form(spec), spec.hf_config, spec.hidden_size
        inner = size_of(spec, "n_inner", "intermediate_size")
        context = renamed(context, form.prefixes, form.layer, self.pieces(spec, inner), self.ends())
        eps = config.get("layer_norm_epsilon", config.get("layer_norm_eps", form.eps))
        style = NormStyle(eps, is_centred=True, has_bias=True)
        words = read_words(spec, context, form.heads, size)
        num_types = config.get("type_vocab_size", 0)
        rotary = RotaryEmbedding(context, self.rotation(config), spec.head_dim)

        def norm(name: str) -> Norm:
            return style.layer(context, name, size)

        def layer(index: int) -> PostNormLayer:
            name = f"model.layers.{index}"
            attention = SequenceAttention(
                context, f"{name}.self_attn", encoder_shape(spec), rotary, bias=form.bias, output_bias=form.bias
            )
            return PostNormLayer(
                attention, norm(f"{name}.attention_norm"), self.mlp(spec, context, index, inner),
                norm(f"{name}.mlp_norm"),
            )  # fmt: skip

        super().__init__(
            EncoderEmbedding(
                context,
                words,
                types=context.read(f"{TYPES}.weight", (num_types, size)) if num_types else None,
                norm=norm("embedding_norm"),
                word_adapters=self.table_adapters(context, WORDS, spec.vocab_size, size),
                type_adapters=self.table_adapters(context, TYPES, num_types, size) if num_types else None,
            ),
            [layer(index) for index in range(spec.num_layers)],
            read_heads(spec, context, words, form.heads, style),
        )

    def table_adapters(self, context: ModelContext, name: str, num_rows: int, size: int) -> LayerAdapters | None:
        """Returns the place of adapters for a table of embeddings; None: it takes none."""
        return None

    def form(self, spec: ModelSpec) -> RotaryForm:
        """Returns the differences from BERT."""
        return self.FORM

    def pieces(self, spec: ModelSpec, inner: int) -> dict[str, Piece]:
        """Returns the places of a layer's tensors. `inner` is the size of the feed-forward block."""
        raise NotImplementedError

    def ends(self) -> dict[str, str]:
        """Returns the names of tensors outside the layers."""
        return {
            WORDS: "embeddings.word_embeddings",
            TYPES: "embeddings.token_type_embeddings",
            "embedding_norm": "emb_ln",
            "pooler": "pooler.dense",
        }

    def rotation(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns config.json with the rotation's base."""
        if (base := config.get("rotary_emb_base")) is not None:  # which checkpoints say, and the library does not
            return {**config, "rope_parameters": None, "rope_theta": base}
        has_base = any(config.get(name) is not None for name in ("rope_parameters", "rope_theta"))
        return config if has_base else {**config, "rope_theta": self.FORM.theta}

    def activation(self, spec: ModelSpec) -> Any:
        """Returns the activation of the feed-forward block."""
        return activation_of(spec, "hidden_act", "gelu")

    def mlp(self, spec: ModelSpec, context: ModelContext, index: int, inner: int) -> FeedForward:
        """Builds the feed-forward block of the layer `index`."""
        form, activation, name = self.form(spec), self.activation(spec), f"model.layers.{index}.mlp"
        if form.is_gated:
            return GatedMLP(context, name, spec.hidden_size, inner, activation, down_bias=form.down_bias)
        return MLP(context, name, spec.hidden_size, inner, activation, bias=form.down_bias)


class GteModel(RotaryBertModel):
    """GTE of 2024 (arXiv:2407.19669): GeGLU, and biases but in the gates."""

    FORM = RotaryForm(
        ("new", "gte"), "encoder.layer.{}", bias=True, is_gated=True, down_bias=True, eps=1e-12, theta=160_000.0,
        heads=HeadForms(
            DenseForm("pooler", "tanh"), vocabulary_dense=DenseForm("lm_head.dense", "gelu", "lm_head.norm"),
            vocabulary="lm_head.decoder", vocabulary_bias="lm_head.decoder.bias",
        ),
    )  # fmt: skip

    def pieces(self, spec: ModelSpec, inner: int) -> dict[str, Piece]:
        size = spec.hidden_size
        q, k, v = fused("attention.qkv_proj", size, size, size)
        up, gate = fused("mlp.up_gate_proj", inner, inner)
        return {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attention.o_proj"),
            "attention_norm": Piece("attn_ln"),
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": Piece("mlp.down_proj"),
            "mlp_norm": Piece("mlp_ln"),
        }  # fmt: skip

    def ends(self) -> dict[str, str]:
        return super().ends() | {"embedding_norm": "embeddings.LayerNorm"}
