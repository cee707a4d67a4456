"""xLSTM 7B (arXiv:2503.13427): a matrix memory in every layer instead of attention."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.recurrent.mlstm import MatrixMemory, MatrixMemoryShape
from quire.executor.models.decoder import size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import PairedDecoder, places_by_kind
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_PIECES = {
    "mlp.gate_proj": Piece("ffn.proj_up_gate"),
    "mlp.up_proj": Piece("ffn.proj_up"),
    "mlp.down_proj": Piece("ffn.proj_down"),
}
_ENDS = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.out_norm"}


class xLSTMForCausalLM(PairedDecoder):
    """Gates and logits are capped."""

    SIZES = ("num_heads",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, num_heads = spec.hf_config, spec.hidden_size, size_of(spec, "num_heads")
        if config.get("use_bias") or config["weight_mode"] != "single":
            raise ModelLoadError(
                f"{spec.name}: {spec.architecture} with use_bias, or with a weight_mode other than single, is not "
                "supported; convert the checkpoint to separate projections without biases."
            )
        multiple = config["ffn_round_up_to_multiple_of"]
        inner_size = int((size * config["ffn_proj_factor"] + multiple - 1) // multiple * multiple)
        eps = config["norm_eps"]
        shape = MatrixMemoryShape(
            hidden_size=size, num_heads=num_heads, key_size=int(size * config["qk_dim_factor"]),
            value_size=int(size * config["v_dim_factor"]), gate_cap=config["gate_soft_cap"],
            norm_eps=eps, eps=config["eps"],
        )  # fmt: skip
        stored = RearrangedWeights(context.weights, _PIECES, layer="backbone.blocks.{}", ends=_ENDS)
        context = replace(context, weights=stored)
        super().__init__(
            spec, context, places_by_kind(context, ["recurrent"] * spec.num_layers),
            lambda place: MatrixMemory(context, place, f"{place.name}.mlstm_layer", shape),
            lambda place: GatedMLP(context, f"{place.name}.mlp", size, inner_size, "silu"),
            vocabulary_ends(
                spec, context, is_tied=config["tie_word_embeddings"],
                softcap=config["output_logit_soft_cap"],
            ),
            norm=NormStyle(eps), norm_names=("norm_mlstm", "norm_ffn"),
        )  # fmt: skip
