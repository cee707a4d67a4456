"""Gemma 3n, text: AltUp's streams, per-layer embeddings, sparse gates, and layers that share keys and values."""

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.shared import SharedAttention, ValueNormAttention, sharing_places
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.mlp import GatedMLP, SparseMLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.residual_streams.altup import AltUp, StreamEnds, drop_unwanted
from quire.executor.layers.residual_streams.per_layer_inputs import PerLayerBlock, PerLayerInputs
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import (
    FeedForward,
    MLPMaker,
    SelfAttention,
    activation_of,
    attention_shape,
    hand_over,
    layer_windows,
    vocabulary_ends,
)
from quire.executor.models.dense.gemma2 import gemma_factor
from quire.executor.models.dense.gemma3 import gemma_rope
from quire.ops.backend import AttentionForm


class Gemma3nLayer:
    """Attention in parallel with a learned augmentation of the residual (Laurel, arXiv:2411.07501), on one of the
    streams.
    """

    def __init__(
        self, spec: ModelSpec, context: ModelContext, place: LayerPlace, attention: SelfAttention, mlp: FeedForward
    ) -> None:
        config, size, name = spec.hf_config, spec.hidden_size, place.name
        self.attention = attention
        self.mlp = mlp
        self._ops = context.ops
        self._place = place
        self._active = config["altup_active_idx"]
        style, activation = _norm(spec), activation_of(spec, "hidden_activation", "gelu_pytorch_tanh")

        def norm(what: str) -> RMSNorm:
            return RMSNorm(context, f"{name}.{what}", size, style)

        streams = config["altup_num_inputs"]
        self._altup = AltUp(context, f"{name}.altup", size, style, num_streams=streams, active=self._active)
        self._before_attention, self._after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self._before_mlp, self._after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        rank = config["laurel_rank"]
        self._laurel_left = ColumnLinear(context, [whole(f"{name}.laurel.linear_left", rank)], size)
        self._laurel_right = ColumnLinear(context, [whole(f"{name}.laurel.linear_right", size)], rank)
        self._after_laurel = norm("laurel.post_laurel_norm")
        self._scale: Tensor | None = None
        if config["altup_correct_scale"]:
            self._scale = context.read(f"{name}.altup.correct_output_scale", (size,))
        input_size = config["hidden_size_per_layer_input"]
        self._per_layer = PerLayerBlock(context, name, place.index, size, input_size, style, activation)

    def __call__(self, streams: Tensor, inputs: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Takes `streams` [num_streams, num_tokens, hidden] and `inputs` [num_tokens, ...] as `PerLayerInputs` computes
        them.

        Returns both. The last layer with keys and values returns only those of the wanted tokens.
        """
        ops = self._ops
        predicted = self._altup.predict(streams)
        normal = self._before_attention(predicted[self._active])
        attended = self._after_attention(self.attention(normal, step))
        if self._place.is_last and step.wanted is not None:
            predicted = drop_unwanted(predicted, step.wanted.tokens)
            normal, inputs = self.attention.outputs_of(normal, step), self.attention.outputs_of(inputs, step)
        laurel = self._after_laurel(self._laurel_right(self._laurel_left(normal)))
        attended = ops.add(predicted[self._active], attended)
        x = ops.scale(ops.add(attended, ops.add(normal, laurel)), 0.5**0.5)
        activated = ops.add(x, self._after_mlp(self.mlp(self._before_mlp(x))))
        corrected = self._altup.correct(predicted, activated)
        first = corrected[self._active]
        if self._scale is not None:
            first = ops.recurrent.multiply_gate(first, self._scale.expand(len(first), -1), "identity")
        ops.residual_streams.add_to_others(corrected, self._per_layer(first, inputs))
        return corrected, inputs


class Gemma3nForCausalLM:
    """The last layers reuse earlier keys and values. Implements `quire.executor.models.base.StagedModel`."""

    SIZES = ("max_position_embeddings",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, style = spec.hf_config, spec.hidden_size, _norm(spec)
        types = _layer_types(config, spec.num_layers)
        windows = layer_windows(types, config["sliding_window"], spec.num_layers)
        rotaries = {kind: RotaryEmbedding(context, gemma_rope(config, kind), spec.head_dim) for kind in set(types)}
        shape, bias = attention_shape(spec), config["attention_bias"]

        def attention(place: LayerPlace) -> SelfAttention:
            rotary, form = rotaries[types[place.index]], AttentionForm(1.0, windows[place.index])
            if place.index >= spec.num_layers - num_shared:
                return SharedAttention(context, place, shape, rotary, form=form, q_norm=style, bias=bias)
            return ValueNormAttention(context, place, shape, rotary, style, form=form, bias=bias)

        num_shared = config["num_kv_shared_layers"]
        places = sharing_places(context, types, spec.num_layers, num_shared)
        mlp = _mlp_maker(spec, context)
        self._layers = [Gemma3nLayer(spec, context, place, attention(place), mlp(place)) for place in places]
        self._embed, self._head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"], scale=gemma_factor(spec, context),
            softcap=config["final_logit_softcapping"],
        )  # fmt: skip
        input_size, self._num_streams = (
            config["hidden_size_per_layer_input"],
            config["altup_num_inputs"],
        )
        self._inputs_size = spec.num_layers * input_size
        self._inputs: PerLayerInputs | None = None
        if context.is_first_stage:
            self._inputs = PerLayerInputs(
                context, style, hidden_size=size, size=input_size, num_layers=spec.num_layers,
                vocab_size=spec.vocab_size, table_size=config["vocab_size_per_layer_input"],
            )  # fmt: skip
        self._ends = StreamEnds(context, size, self._num_streams)
        self._norm = RMSNorm(context, "model.norm", size, style)
        self.kv_layers = [kv for layer in self._layers if (kv := layer.attention.kv) is not None]
        self.state_layers = ()
        blocks = max(layer.attention.activation_size + layer.mlp.activation_size for layer in self._layers)
        self.num_layer_outputs = 0
        self.activation_size = blocks + self._inputs_size + 3 * self._num_streams * size

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        if self._inputs is not None:
            x = self._embed(token_ids, step)
            inputs, streams = self._inputs(token_ids, x, step), self._ends.expand(x)
        else:
            assert step.received is not None
            inputs = step.received[: len(token_ids) * self._inputs_size].view(len(token_ids), -1)
            streams = step.received[inputs.numel() :].view(self._num_streams, len(token_ids), -1)
        for layer in self._layers:
            streams, inputs = layer(streams, inputs, step)
        if step.hands_over:
            return hand_over(inputs, streams)
        return self._norm(self._ends.collapse(streams))

    def handover_size(self, hidden_size: int) -> int:
        """Counts the layers' inputs and all streams."""
        return self._inputs_size + self._num_streams * hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def _norm(spec: ModelSpec) -> NormStyle:
    return NormStyle(spec.hf_config["rms_norm_eps"], is_wide=True)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns `layer_types`, or the default: every fifth layer sees all tokens."""
    types = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(num_layers)]
    return config.get("layer_types") or types


def _mlp_maker(spec: ModelSpec, context: ModelContext) -> MLPMaker:
    """Builds the feed-forward block of a layer, whose size and fraction of zero gates config.json lists."""
    config = spec.hf_config
    sizes = _by_layer(spec, "intermediate_size", config["intermediate_size"])
    sparsity = config.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95 if spec.num_layers > 10 and index < 10 else 0.0 for index in range(spec.num_layers)]
    shares = _by_layer(spec, "activation_sparsity_pattern", sparsity)
    activation = activation_of(spec, "hidden_activation", "gelu_pytorch_tanh")

    def make(place: LayerPlace) -> FeedForward:
        name, size, share = f"{place.name}.mlp", sizes[place.index], shares[place.index]
        if not share:
            return GatedMLP(context, name, spec.hidden_size, size, activation)
        return SparseMLP(context, name, spec.hidden_size, size, activation, NormalDist().inv_cdf(share))

    return make


def _by_layer(spec: ModelSpec, field: str, value: Any) -> Sequence[Any]:
    """Returns one value a layer, from a list or a single value.

    Raises:
        ModelLoadError: a list that is too short.
    """
    values = value if isinstance(value, Sequence) else [value] * spec.num_layers
    if len(values) < spec.num_layers:
        raise ModelLoadError(
            f"config.json: {field} must have a value for each of {spec.num_layers} layers, got {len(values)}."
        )
    return values
