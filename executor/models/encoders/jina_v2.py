"""Jina's embeddings v2 (arXiv:2310.19923): BERT with biases by distance instead of positions, and gates."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.positions.alibi import distance_slopes
from quire.executor.models.decoder import FeedForward, SettingError, size_of
from quire.executor.models.encoders.bert import BERT_ENDS, BERT_PIECES, BERT_VOCABULARY, BertModel, Family
from quire.executor.models.encoders.heads import DenseForm, HeadForms
from quire.executor.weights.rearranged import Piece, fused
from quire.ops.activations import PlainActivation
from quire.ops.backend import AttentionForm

_ACTIVATIONS: dict[str, PlainActivation] = {"geglu": "gelu", "reglu": "relu"}


class JinaBertModel(BertModel):
    """Jina's BERT. The pieces of its gates depend on their size, so they are added to the family's."""

    POSITIONS = "alibi"
    FAMILY = Family(
        "bert",
        HeadForms(DenseForm("pooler", "tanh"), **BERT_VOCABULARY),
        pieces={
            **BERT_PIECES,
            "mlp.down_proj": Piece("mlp.wo"),
            "mlp_norm": Piece("mlp.layernorm"),
        },
        ends={name: stored for name, stored in BERT_ENDS.items() if name != "positions"},
    )

    def pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        inner = size_of(spec, "intermediate_size")
        gate, up = fused("mlp.gated_layers", inner, inner)
        return {**super().pieces(spec), "mlp.gate_proj": gate, "mlp.up_proj": up}

    def form(self, spec: ModelSpec, context: ModelContext) -> AttentionForm:
        biases = distance_slopes(spec.num_attention_heads, context.max_model_len)
        return AttentionForm(spec.head_dim**-0.5, distance_bias=biases.to(context.device))

    def positions(self, spec: ModelSpec, context: ModelContext, width: int) -> None:
        return None

    def mlp(self, spec: ModelSpec, context: ModelContext, name: str) -> FeedForward:
        kind = spec.hf_config.get("feed_forward_type", "original")
        if kind not in _ACTIVATIONS:
            raise SettingError(
                f"{spec.name}: config.json's feed_forward_type {kind!r} is not supported, only "
                f"{' and '.join(_ACTIVATIONS)}."
            )
        inner = size_of(spec, "intermediate_size")
        return GatedMLP(context, name, spec.hidden_size, inner, _ACTIVATIONS[kind], down_bias=True)
