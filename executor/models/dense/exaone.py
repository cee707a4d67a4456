"""EXAONE 3 to 3.5 (arXiv:2408.03541, 2412.04862): Llama under GPT-2's names."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_ENDS = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
_PIECES = {
    "input_layernorm": Piece("ln_1"),
    **{f"self_attn.{name}_proj": Piece(f"attn.attention.{name}_proj") for name in "qkv"},
    "self_attn.o_proj": Piece("attn.attention.out_proj"),
    "post_attention_layernorm": Piece("ln_2"),
    "mlp.gate_proj": Piece("mlp.c_fc_0"),
    "mlp.up_proj": Piece("mlp.c_fc_1"),
    "mlp.down_proj": Piece("mlp.c_proj"),
}


class ExaoneForCausalLM(LlamaForCausalLM):
    """config.json has either EXAONE's field names or Llama's."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        weights = RearrangedWeights(context.weights, _PIECES, layer="transformer.h.{}", ends=_ENDS)
        super().__init__(spec, replace(context, weights=weights))
