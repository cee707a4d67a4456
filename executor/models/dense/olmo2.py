"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (arXiv:2512.13961)."""

from typing import Any

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    layer_windows,
    norm_style,
    size_of,
    vocabulary_ends,
)
from quire.ops.backend import AttentionForm


class ProjectionNorm:
    """A norm over all heads of queries or keys, which are divided among ranks."""

    def __init__(self, context: ModelContext, name: str, num_heads: int, head_dim: int, style: NormStyle) -> None:
        self._ops = context.ops
        self._group = context.group
        self._copies = max(1, context.group.size // num_heads)  # neighbouring ranks that hold the same head
        self._weight = style.read(context, name, num_heads * head_dim)
        self._eps = style.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Maps `x` [num_tokens, the rank's heads * head_dim] to the same shape."""
        if self._group.size == 1:
            return self._ops.rms_norm(x, self._weight, self._eps)
        size, first = x.shape[1], self._group.rank // self._copies * x.shape[1]
        parts = self._group.all_gather(x.contiguous(), dim=-1).unflatten(1, (-1, self._copies, size))
        normal = self._ops.rms_norm(parts[:, :, 0].flatten(1), self._weight, self._eps)
        return normal[:, first : first + size].contiguous()


class Olmo2Attention(Attention):
    """Queries and keys are normalized as whole projections, not head by head."""

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        rotary: RotaryEmbedding | None,
        norm: NormStyle,
        **options: Any,
    ) -> None:
        super().__init__(context, place, shape, rotary, **options)
        name = f"{place.name}.self_attn"
        self._q_norm = ProjectionNorm(context, f"{name}.q_norm", shape.num_heads, shape.head_dim, norm)
        self._k_norm = ProjectionNorm(context, f"{name}.k_norm", shape.num_kv_heads, shape.head_dim, norm)

    def _store(self, heads: Tensor, step: StepContext, pages: Tensor, slot_mapping: Tensor) -> Tensor:
        num_tokens, head_dim = len(heads), heads.shape[2]
        q_size, kv_size = self._num_heads * head_dim, self.kv.num_kv_heads * head_dim
        rows = heads.view(num_tokens, -1)
        q, k = self._q_norm(rows[:, :q_size]), self._k_norm(rows[:, q_size : q_size + kv_size])
        q, k, v = (x.view(num_tokens, -1, head_dim) for x in (q, k, rows[:, q_size + kv_size :]))
        cos, sin = self._rotation(step)
        self._ops.write_kv(self._ops.rotary(k, cos, sin), v, pages, slot_mapping, self._cache_scales)
        return self._ops.rotary(q, cos, sin)


class Olmo2ForCausalLM(Decoder):
    """A block's output is normalized, not its input."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, style, size = spec.hf_config, norm_style(spec), spec.hidden_size
        types, windows = self.layer_types(spec)
        rotaries = {kind: self.rotary(spec, context, kind) for kind in dict.fromkeys(types)}
        bias, activation = config.get("attention_bias"), activation_of(spec, "hidden_act")

        def layer(place: LayerPlace) -> ResidualLayer:
            attention = Olmo2Attention(
                context, place, attention_shape(spec), rotaries[types[place.index]], style,
                qkv_bias=bias, output_bias=bias, form=AttentionForm(spec.head_dim**-0.5, windows[place.index]),
            )  # fmt: skip
            mlp = GatedMLP(context, f"{place.name}.mlp", size, size_of(spec, "intermediate_size"), activation)
            return ResidualLayer(
                context.ops, attention, mlp,
                after_attention=style.layer(context, f"{place.name}.post_attention_layernorm", size),
                after_mlp=style.layer(context, f"{place.name}.post_feedforward_layernorm", size),
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)

    def layer_types(self, spec: ModelSpec) -> tuple[list[str], list[int | None]]:
        """Returns each layer's type and window."""
        return ["full_attention"] * spec.num_layers, [None] * spec.num_layers

    def rotary(self, spec: ModelSpec, context: ModelContext, kind: str) -> RotaryEmbedding:
        """Builds the rotation of layers of one type."""
        return RotaryEmbedding(context, spec.hf_config, spec.head_dim)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three of four layers have a window; only the others stretch their rotation."""

    def layer_types(self, spec: ModelSpec) -> tuple[list[str], list[int | None]]:
        """Returns each layer's type and window."""
        types = spec.hf_config.get("layer_types") or [
            "full_attention" if index % 4 == 3 else "sliding_attention" for index in range(spec.num_layers)
        ]
        return types, layer_windows(types, spec.hf_config["sliding_window"], spec.num_layers)

    def rotary(self, spec: ModelSpec, context: ModelContext, kind: str) -> RotaryEmbedding:
        """Builds the rotation of layers of one type; before transformers 5, `rope_scaling` is for full layers."""
        config = {"rope_theta": 500_000.0, **spec.hf_config}
        if kind == "sliding_attention" and not config.get("rope_parameters"):
            config["rope_scaling"] = None
        return RotaryEmbedding(context, config, spec.head_dim, layer_type=kind)
