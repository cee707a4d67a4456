"""Zamba2 (arXiv:2411.15242): Mamba 2 mixers, some of them after one of a few shared transformer blocks."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import AdaptedLinear, ColumnLinear, LowRankLinear, RowLinear, whole
from quire.executor.layers.norm import Norm, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.base import parts_of, within
from quire.executor.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Shape
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import activation_of, hand_over, norm_style, size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import places_by_kind
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm, Backend


class Zamba2ForCausalLM:
    """The hybrid layers use the shared blocks in turn. Implements `quire.executor.models.base.StagedModel`."""

    SIZES = ("intermediate_size", "n_mamba_heads", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size, style = spec.hf_config, spec.hidden_size, norm_style(spec)
        stored = {f"self_attn.{part}_proj": Piece(f"shared_transformer.self_attn.{part}_proj") for part in "qkvo"}
        context = replace(context, weights=RearrangedWeights(context.weights, stored))
        hybrid, shape = _hybrid_layers(spec), _mamba2_shape(spec)
        names = hybrid[: config["num_mem_blocks"]]
        own = [index for index in hybrid if index in context.layers]
        used = sorted({hybrid.index(index) % len(names) for index in own})
        blocks = {number: SharedBlock(spec, context, names[number]) for number in used}

        def layer(place: LayerPlace) -> Zamba2Layer:
            name, use = place.name, None
            if place.index in hybrid:
                number = hybrid.index(place.index)
                block, kept = (
                    blocks[number % len(names)],
                    LayerPlace(place.index, own.index(place.index), is_last=False),
                )
                use = BlockUse(spec, context, block, kept, number)
                name = f"{name}.mamba_decoder"
            mixer = Mamba2Mixer(context, place, shape, f"{name}.mamba")
            return Zamba2Layer(context.ops, RMSNorm(context, f"{name}.input_layernorm", size, style), mixer, use)

        self._layers = [layer(place) for place in places_by_kind(context, ["recurrent"] * spec.num_layers)]
        self._norm = RMSNorm(context, "model.final_layernorm", size, style)
        self._embed, self._head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"]
        )  # fmt: skip
        self.kv_layers = [layer.use.attention.kv for layer in self._layers if layer.use is not None]
        self.state_layers = [layer.mixer.state for layer in self._layers]
        self.num_layer_outputs = 0
        self.activation_size = max(layer.activation_size for layer in self._layers)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x: Tensor
        residual: Tensor | None
        if step.received is None:
            embedded = self._embed(token_ids, step)
            x, residual = self._embed(token_ids, step), None  # its memory becomes the residual stream's
        else:
            x, residual, embedded = step.received.view(3, len(token_ids), -1)
        for layer in self._layers:
            x, residual = layer(x, residual, embedded, step)
        assert residual is not None
        if step.hands_over:
            return hand_over(x, residual, embedded)
        return self._norm.add(x, residual)[0]

    def handover_size(self, hidden_size: int) -> int:
        """Counts output, residual and embedding."""
        return 3 * hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class Zamba2Layer:
    """Computes `x + mixer(norm(x + use(x)))`, or without a shared block `x + mixer(norm(x))`."""

    def __init__(self, ops: Backend, norm: Norm, mixer: Mamba2Mixer, use: "BlockUse | None") -> None:
        self.mixer = mixer
        self.use = use
        self._ops = ops
        self._norm = norm
        self.activation_size = mixer.activation_size + (0 if use is None else use.activation_size)

    def __call__(
        self, x: Tensor, residual: Tensor | None, embedded: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns x and residual as a `DecoderLayer`; `embedded` [num_tokens, hidden] are the tokens'
        embeddings.
        """
        if self.use is None:
            normal, residual = self._norm.add(x, residual)
        else:
            residual = x if residual is None else self._ops.add(x, residual)
            normal = self._norm(self._ops.add(residual, self.use(residual, embedded, step)))
        return self.mixer(normal, step), self.mixer.outputs_of(residual, step)


class SharedBlock:
    """The weights that all uses of one block share: attention, then a feed-forward network, each on a norm."""

    def __init__(self, spec: ModelSpec, context: ModelContext, index: int) -> None:
        """Takes the `index` of the layer that uses the block first. The checkpoint has the weights under that layer's
        name.
        """
        config, size, heads = spec.hf_config, spec.hidden_size, spec.num_attention_heads
        self.name = f"model.layers.{index}.shared_transformer"
        shape = AttentionShape(2 * size, heads, spec.num_kv_heads, 2 * size // heads, output_size=size)
        rotary = RotaryEmbedding(context, config, shape.head_dim) if config["use_mem_rope"] else None
        form, place = AttentionForm((shape.head_dim / 2) ** -0.5), LayerPlace(index, 0, is_last=False)
        self.attention = Attention(context, place, shape, rotary, form=form)
        self.input_norm = RMSNorm(context, f"{self.name}.input_layernorm", 2 * size, norm_style(spec))
        self.feed_forward_norm = RMSNorm(context, f"{self.name}.pre_ff_layernorm", size, norm_style(spec))
        inner, bias = size_of(spec, "intermediate_size"), config["add_bias_linear"]
        shard = context.shard(0, inner, "intermediate (feed-forward) dimensions")
        name = f"{self.name}.feed_forward"
        self.gate_up_parts = parts_of(f"{name}.gate_up_proj", [shard, within(shard, inner)], 2 * inner)
        self.gate_up = ColumnLinear(context, self.gate_up_parts, size, bias=bias)
        self.down = RowLinear(context, f"{name}.down_proj", inner, size, shard._replace(dim=1), bias=bias)
        self.feed_forward_size = 3 * (shard.stop - shard.start)


class BlockUse:
    """One use of a shared block: the block's weights with this use's low-rank adapters and projection.

    Attributes:
        activation_size: values that the use computes for each token.
    """

    def __init__(
        self, spec: ModelSpec, context: ModelContext, block: SharedBlock, place: LayerPlace, number: int
    ) -> None:
        """Takes the use's `number` over all blocks. `place` is that of its keys and values."""
        size, rank = spec.hidden_size, spec.hf_config["adapter_rank"]

        def renamed(part: LinearPart, name: str) -> LinearPart:
            return part._replace(name=f"{block.name}.{name}_adapter_list.{number}")

        adapter = None
        if spec.hf_config["use_shared_attention_adapter"]:
            queries_keys_values = zip("qkv", block.attention.parts, strict=True)
            layers = [[renamed(part, f"self_attn.linear_{letter}")] for letter, part in queries_keys_values]
            adapter = LowRankLinear(context, layers, 2 * size, rank)
        self._ops = context.ops
        self._block = block
        self.attention = block.attention.used_at(place, adapter)
        gate_up = [renamed(part, "feed_forward.gate_up_proj") for part in block.gate_up_parts]
        self._gate_up = AdaptedLinear(context.ops, block.gate_up, LowRankLinear(context, [gate_up], size, rank))
        self._activation = activation_of(spec, "hidden_act", "gelu")
        self._linear = ColumnLinear(context, [whole(f"{place.name}.linear", size)], size)
        self.activation_size = self.attention.activation_size + 4 * size + block.feed_forward_size

    def __call__(self, x: Tensor, embedded: Tensor, step: StepContext) -> Tensor:
        """Computes the block's addition to `x`, from `x` and `embedded`. All are [num_tokens, hidden]."""
        block, ops = self._block, self._ops
        x = self.attention(block.input_norm(ops.join([x, embedded])), step)
        x = block.feed_forward_norm(x)
        return self._linear(block.down(ops.activate_and_mul(self._gate_up(x), self._activation)))


def _hybrid_layers(spec: ModelSpec) -> Sequence[int]:
    """Lists the layers that use a shared block.

    Raises:
        ModelLoadError: config.json names no types of layers, or too few.
    """
    types = spec.hf_config.get("layers_block_type") or spec.hf_config.get("layer_types") or []
    if len(types) < spec.num_layers:
        raise ModelLoadError(
            f"config.json: layers_block_type must name each of {spec.num_layers} layers, it names {len(types)}."
        )
    return [index for index in range(spec.num_layers) if types[index] == "hybrid"]


def _mamba2_shape(spec: ModelSpec) -> Mamba2Shape:
    config, num_heads = spec.hf_config, size_of(spec, "n_mamba_heads")
    bias = config["add_bias_linear"]
    return Mamba2Shape(
        spec.hidden_size, num_heads, config["mamba_expand"] * spec.hidden_size // num_heads,
        num_groups=config["mamba_ngroups"], state_size=config["mamba_d_state"],
        conv_width=config["mamba_d_conv"], norm_eps=1e-5, bias=bias, output_bias=bias,
        dt_limit=(config["time_step_min"], math.inf),
    )  # fmt: skip
