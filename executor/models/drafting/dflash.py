"""DFlash (arXiv:2602.06036): layers that make a block of drafts at once, in the places of mask tokens.

For each known token but the newest, the layers keep keys and values that they make of the target's states. A block is
the newest token and masks: its tokens see all of these, and each other.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention
from quire.executor.layers.attention.layer_kv import LayerKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import PreNormLayer, attention_shape, mlp_maker, norm_style
from quire.executor.models.drafting.parts import ends_of, has_tensor, places_of


class BlockHeads:
    """Qwen3's layers. Implements `BlockDraftHeads`."""

    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, style = spec.hf_config, spec.hidden_size, norm_style(spec)
        _check(spec)
        self.target_layers: Sequence[int] = tuple(config["target_layers"])
        self.mask_token_id: int = config["dflash_config"]["mask_token_id"]
        self._embed, self._head = ends_of(spec, context)
        states_size = len(self.target_layers) * config["target_hidden_size"]
        self._join = ColumnLinear(context, [whole("fc", size)], states_size)
        self._states_norm = RMSNorm(context, "hidden_norm", size, style)
        rotary, make_mlp = RotaryEmbedding(context, config, spec.head_dim), mlp_maker(spec, context)
        self._attentions: list[_Attention] = []
        self._layers = []
        for place in places_of(spec):
            name = f"{place.name}.self_attn"
            attention = _Attention(
                context, place, attention_shape(spec), rotary, qk_norm=style,
                qkv_bias=has_tensor(context, f"{name}.q_proj.bias"),
                output_bias=has_tensor(context, f"{name}.o_proj.bias"),
            )  # fmt: skip
            self._attentions.append(attention)
            self._layers.append(
                PreNormLayer(
                    RMSNorm(context, f"{place.name}.input_layernorm", size, style),
                    attention,
                    RMSNorm(context, f"{place.name}.post_attention_layernorm", size, style),
                    make_mlp(place),
                )
            )
        self._norm = RMSNorm(context, "model.norm", size, style)
        self.kv_layers: Sequence[LayerKV] = [attention.kv for attention in self._attentions]
        self.activation_size = states_size + max(
            layer.attention.activation_size + layer.mlp.activation_size for layer in self._layers
        )

    def read_target(self, states: Tensor) -> Tensor:
        return self._states_norm(self._join(states))

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Stores keys and values of the target's states, if the step has any; else computes the hidden states of a
        block.
        """
        if step.target_states is not None:
            for attention in self._attentions:
                attention.store(step.target_states, step)
            return step.target_states
        x, residual = self._embed(token_ids, step), None
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        return self._norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class _Attention(Attention):
    def store(self, states: Tensor, step: StepContext) -> None:
        """Stores the keys and values of `states` [num_tokens, hidden], as if these were the layer's normed input."""
        heads = self._project(states)[:, : self._qkv_size].unflatten(1, (-1, self._head_dim))
        pages, group = step.caches[self._place.number]
        self._store(heads, step, pages, step.attention[group].slot_mapping)


def _check(spec: ModelSpec) -> None:
    """Refuses forms of blocks.

    Raises:
        ModelLoadError: windows, tokens of a block that do not see later ones, drafts in the newest token's place, or
            no mask token.
    """
    config = spec.hf_config
    own = config.get("dflash_config") or {}
    windows = own.get("use_swa") or any(kind != "full_attention" for kind in config.get("layer_types") or ())
    for is_there, what in (
        (windows, "layers with windows"),
        (own.get("causal") or config.get("is_causal"), "blocks whose tokens see earlier ones alone"),
        (own.get("sample_from_anchor"), "drafts in the place of the newest token"),
        (not isinstance(own.get("mask_token_id"), int), "no mask_token_id"),
    ):
        if is_there:
            raise ModelLoadError(
                f"{spec.name}: config.json says {what}, which the method dflash does not serve: take another draft."
            )
