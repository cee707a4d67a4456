"""BERT (arXiv:1810.04805) and its kin: learned positions, norms after each block, a feed-forward block without gates.

RoBERTa (1907.11692), XLM-RoBERTa (1911.02116), CamemBERT (1911.03894), ELECTRA (2003.10555), DistilBERT (1910.01108),
ALBERT (1909.11942) and MPNet (2004.09297) differ in names, in where positions begin, and in the parts that are declared
here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.models.decoder import FeedForward, activation_of, size_of
from quire.executor.models.encoders.encoder import (
    Encoder,
    EncoderEmbedding,
    PostNormLayer,
    encoder_shape,
    position_rows,
    projection,
    relative_bias,
    renamed,
)
from quire.executor.models.encoders.heads import WORDS, DenseForm, HeadForms, read_heads, read_words
from quire.executor.weights.rearranged import Piece, fused
from quire.ops.backend import AttentionForm

BERT_PIECES = {
    "self_attn.q_proj": Piece("attention.self.query"),
    "self_attn.k_proj": Piece("attention.self.key"),
    "self_attn.v_proj": Piece("attention.self.value"),
    "self_attn.o_proj": Piece("attention.output.dense"),
    "attention_norm": Piece("attention.output.LayerNorm"),
    "mlp.up_proj": Piece("intermediate.dense"),
    "mlp.down_proj": Piece("output.dense"),
    "mlp_norm": Piece("output.LayerNorm"),
}
BERT_ENDS = {
    WORDS: "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
BERT_VOCABULARY: dict[str, Any] = {
    "vocabulary_dense": DenseForm("cls.predictions.transform.dense", "gelu", "cls.predictions.transform.LayerNorm"),
    "vocabulary": "cls.predictions.decoder",
    "vocabulary_bias": "cls.predictions.bias",
}
_ROBERTA_VOCABULARY: dict[str, Any] = {
    "vocabulary_dense": DenseForm("lm_head.dense", "gelu", "lm_head.layer_norm"),
    "vocabulary": "lm_head.decoder",
    "vocabulary_bias": "lm_head.bias",
}
_DENSE_AND_OUT: dict[str, Any] = {"dense": DenseForm("classifier.dense", "tanh"), "out": "classifier.out_proj"}


@dataclass(frozen=True)
class Family:
    """The names of tensors in a family's checkpoints, and its differences from BERT.

    Attributes:
        prefix: of names in checkpoints with a head.
        intermediate: the field of config.json with the size of the feed-forward block.
        activation: the field with its activation.
        is_behind_padding: the first token has the position after that of padding, which has the number of its token.
        eps: of norms, where config.json has none.
    """

    prefix: str
    heads: HeadForms
    layer: str = "encoder.layer.{}"
    pieces: Mapping[str, Piece] = field(default_factory=lambda: BERT_PIECES)
    ends: Mapping[str, str] = field(default_factory=lambda: BERT_ENDS)
    intermediate: str = "intermediate_size"
    activation: str = "hidden_act"
    is_behind_padding: bool = False
    eps: float = 1e-12


class BertModel(Encoder):
    """BERT, with a pooler before its labels."""

    SIZES: Sequence[str] = ("intermediate_size", "max_position_embeddings")
    POSITIONS = "absolute"
    FAMILY = Family("bert", HeadForms(DenseForm("pooler", "tanh"), **BERT_VOCABULARY))

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        family, config, size = self.FAMILY, spec.hf_config, spec.hidden_size
        positions = config.get("position_embedding_type", "absolute")
        if positions != self.POSITIONS:
            raise ModelLoadError(  # whose class of Transformers does not read it
                f"{spec.name}: config.json's position_embedding_type {positions!r} is not supported in "
                f"{spec.architecture}, only {self.POSITIONS}."
            )
        context = renamed(context, (family.prefix,), family.layer, self.pieces(spec), self.ends(spec))
        style = NormStyle(config.get("layer_norm_eps", family.eps), is_centred=True, has_bias=True)
        width = self.width(spec)
        words = read_words(spec, context, self.heads(spec), width)
        form = self.form(spec, context)
        layers = {name: self._layer(spec, context, name, style, form) for name in dict.fromkeys(self.layers(spec))}
        super().__init__(
            EncoderEmbedding(
                context,
                words,
                positions=self.positions(spec, context, width),
                types=None
                if "types" not in family.ends
                else context.read("types.weight", (config.get("type_vocab_size", 2), width)),
                norm=style.layer(context, "embedding_norm", width),
                after_norm=projection(context, "widening", width, size, bias=True) if self.widens(spec) else None,
            ),
            [layers[name] for name in self.layers(spec)],
            read_heads(spec, context, words, self.heads(spec), style),
        )

    def width(self, spec: ModelSpec) -> int:
        """Returns the size of the embeddings."""
        return spec.hidden_size

    def widens(self, spec: ModelSpec) -> bool:
        """Returns True if a layer maps the embeddings to hidden states."""
        return self.width(spec) != spec.hidden_size

    def pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        """Returns the places of a layer's tensors."""
        return dict(self.FAMILY.pieces)

    def ends(self, spec: ModelSpec) -> Mapping[str, str]:
        """Returns the names of tensors outside the layers."""
        return {**self.FAMILY.ends, "pooler": "pooler.dense"}

    def layers(self, spec: ModelSpec) -> list[str]:
        """Lists the layers' names; one that occurs again has the same weights."""
        return [f"model.layers.{index}" for index in range(spec.num_layers)]

    def heads(self, spec: ModelSpec) -> HeadForms:
        """Returns the heads that the checkpoint may have."""
        return self.FAMILY.heads

    def form(self, spec: ModelSpec, context: ModelContext) -> AttentionForm | None:
        """Returns the form of attention in all layers; None: the plain one."""
        return None

    def positions(self, spec: ModelSpec, context: ModelContext, width: int) -> Tensor | None:
        """Reads the rows of positions; None: the model has none."""
        num_rows = size_of(spec, "max_position_embeddings")
        first = spec.hf_config.get("pad_token_id", 1) + 1 if self.FAMILY.is_behind_padding else 0
        return position_rows(context, "positions.weight", num_rows, width, first=first)

    def mlp(self, spec: ModelSpec, context: ModelContext, name: str) -> FeedForward:
        """Builds the feed-forward block called `name`."""
        activation = activation_of(spec, self.FAMILY.activation, "gelu")
        return MLP(context, name, spec.hidden_size, size_of(spec, self.FAMILY.intermediate), activation)

    def _layer(
        self, spec: ModelSpec, context: ModelContext, name: str, style: NormStyle, form: AttentionForm | None
    ) -> PostNormLayer:
        def norm(part: str) -> Norm:
            return style.layer(context, f"{name}.{part}", spec.hidden_size)

        return PostNormLayer(
            SequenceAttention(context, f"{name}.self_attn", encoder_shape(spec), form=form),
            norm("attention_norm"),
            self.mlp(spec, context, f"{name}.mlp"),
            norm("mlp_norm"),
        )


_ROBERTA = Family(
    "roberta", HeadForms(**_DENSE_AND_OUT, **_ROBERTA_VOCABULARY), is_behind_padding=True, eps=1e-5
)  # fmt: skip
_FLASH_ROBERTA = replace(
    _ROBERTA, layer="encoder.layers.{}", pieces={}, ends=BERT_ENDS | {"embedding_norm": "emb_ln"}
)  # fmt: skip
"""XLM-RoBERTa in Jina's code for FlashAttention, as Jina Reranker v2 is stored."""


def flash_pieces(size: int) -> dict[str, Piece]:
    """Returns the places of a layer's tensors in the names of that code."""
    q, k, v = fused("mixer.Wqkv", size, size, size)
    return {
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
        "self_attn.o_proj": Piece("mixer.out_proj"),
        "attention_norm": Piece("norm1"),
        "mlp.up_proj": Piece("mlp.fc1"), "mlp.down_proj": Piece("mlp.fc2"),
        "mlp_norm": Piece("norm2"),
    }  # fmt: skip


class RobertaModel(BertModel):
    """RoBERTa, XLM-RoBERTa and CamemBERT."""

    FAMILY = _ROBERTA

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        stored = (f"{stem}encoder.layers.0.mixer.Wqkv.weight" for stem in (f"{_ROBERTA.prefix}.", ""))
        if any(context.find(name) is not None for name in stored):
            self.FAMILY = _FLASH_ROBERTA
        super().__init__(spec, context)

    def pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        return dict(self.FAMILY.pieces) or flash_pieces(spec.hidden_size)


class ElectraModel(BertModel):
    """ELECTRA, whose embeddings may be narrower than its layers."""

    FAMILY = Family("electra", HeadForms(DenseForm("classifier.dense", "gelu"), "classifier.out_proj"))

    def width(self, spec: ModelSpec) -> int:
        return size_of(spec, "embedding_size")

    def ends(self, spec: ModelSpec) -> Mapping[str, str]:
        return BERT_ENDS | {"widening": "embeddings_project"}

    def heads(self, spec: ModelSpec) -> HeadForms:
        dense = DenseForm("generator_predictions.dense", "gelu", "generator_predictions.LayerNorm")
        return self.FAMILY.heads._replace(
            vocabulary_dense=dense,
            vocabulary="generator_lm_head",
            vocabulary_bias="generator_lm_head.bias",
            vocabulary_size=self.width(spec),
        )


class AlbertModel(BertModel):
    """ALBERT: layers of a group share their weights, and embeddings are narrower than layers."""

    FAMILY = Family("albert", HeadForms(DenseForm("pooler", "tanh")))

    def width(self, spec: ModelSpec) -> int:
        return spec.hf_config.get("embedding_size", 128)

    def widens(self, spec: ModelSpec) -> bool:
        return True  # of equal sizes, too

    def layers(self, spec: ModelSpec) -> list[str]:
        groups = spec.hf_config.get("num_hidden_groups", 1)
        inner = range(spec.hf_config.get("inner_group_num", 1))
        numbers = [index * groups // spec.num_layers for index in range(spec.num_layers)]
        return [f"groups.{number}.{place}" for number in numbers for place in inner]

    def ends(self, spec: ModelSpec) -> Mapping[str, str]:
        names = {
            "self_attn.q_proj": "attention.query",
            "self_attn.k_proj": "attention.key",
            "self_attn.v_proj": "attention.value",
            "self_attn.o_proj": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "mlp.up_proj": "ffn",
            "mlp.down_proj": "ffn_output",
            "mlp_norm": "full_layer_layer_norm",
        }
        layers: dict[str, str] = {}
        for layer in set(self.layers(spec)):
            _, group, place = layer.split(".")
            stored = f"encoder.albert_layer_groups.{group}.albert_layers.{place}"
            layers |= {f"{layer}.{own}": f"{stored}.{other}" for own, other in names.items()}
        return BERT_ENDS | layers | {"widening": "encoder.embedding_hidden_mapping_in", "pooler": "pooler"}

    def heads(self, spec: ModelSpec) -> HeadForms:
        activation = activation_of(spec, "hidden_act", "gelu_new")
        assert activation in ("gelu", "gelu_tanh", "relu", "silu"), activation
        return self.FAMILY.heads._replace(
            vocabulary_dense=DenseForm("predictions.dense", activation, "predictions.LayerNorm"),
            vocabulary="predictions.decoder",
            vocabulary_bias="predictions.bias",
            vocabulary_size=self.width(spec),
        )


class DistilBertModel(BertModel):
    """DistilBERT: BERT without segments."""

    SIZES = ("hidden_dim", "max_position_embeddings")
    FAMILY = Family(
        "distilbert",
        HeadForms(
            DenseForm("pre_classifier", "relu"),
            vocabulary_dense=DenseForm("vocab_transform", "gelu", "vocab_layer_norm"),
            vocabulary="vocab_projector",
            vocabulary_bias="vocab_projector.bias",
        ),
        layer="transformer.layer.{}",
        pieces={
            "self_attn.q_proj": Piece("attention.q_lin"),
            "self_attn.k_proj": Piece("attention.k_lin"),
            "self_attn.v_proj": Piece("attention.v_lin"),
            "self_attn.o_proj": Piece("attention.out_lin"),
            "attention_norm": Piece("sa_layer_norm"),
            "mlp.up_proj": Piece("ffn.lin1"),
            "mlp.down_proj": Piece("ffn.lin2"),
            "mlp_norm": Piece("output_layer_norm"),
        },
        ends={name: stored for name, stored in BERT_ENDS.items() if name != "types"},
        intermediate="hidden_dim",
        activation="activation",
    )


class MPNetModel(BertModel):
    """MPNet: biases by distance beside its positions, and no segments."""

    FAMILY = Family(
        "mpnet",
        HeadForms(**_DENSE_AND_OUT, **_ROBERTA_VOCABULARY),
        pieces=BERT_PIECES
        | {
            "self_attn.q_proj": Piece("attention.attn.q"),
            "self_attn.k_proj": Piece("attention.attn.k"),
            "self_attn.v_proj": Piece("attention.attn.v"),
            "self_attn.o_proj": Piece("attention.attn.o"),
            "attention_norm": Piece("attention.LayerNorm"),
        },
        ends={name: stored for name, stored in BERT_ENDS.items() if name != "types"}
        | {"distances": "encoder.relative_attention_bias"},
    )

    def positions(self, spec: ModelSpec, context: ModelContext, width: int) -> Tensor:
        num_rows = size_of(spec, "max_position_embeddings")
        return position_rows(context, "positions.weight", num_rows, width, first=2)  # whatever the token of padding

    def form(self, spec: ModelSpec, context: ModelContext) -> AttentionForm:
        count = spec.hf_config.get("relative_attention_num_buckets", 32)
        table = context.read("distances.weight", (count, spec.num_attention_heads), dtype=torch.float32)
        return AttentionForm(spec.head_dim**-0.5, distance_bias=relative_bias(table, context.max_model_len, 128))
