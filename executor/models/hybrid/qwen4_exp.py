"""Qwen4-Exp, text: Gated DeltaNets and attention to selected blocks, in streams to which some layers add n-grams."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.compressed_rows import StepPlaces
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.indexed import BlockIndexerShape, IndexedAttention
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.gated_delta import GatedDeltaNet
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.residual_streams.gated_streams import StreamMixer, inject
from quire.executor.layers.residual_streams.ngrams import NGramLayer, NGramShape
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import (
    FeedForward,
    SettingError,
    attention_shape,
    hand_over,
    size_of,
    vocabulary_ends,
)
from quire.executor.models.hybrid.qwen3_next import delta_shape, parts_one_by_one
from quire.executor.models.mixtures.qwen2_moe import mixture_maker
from quire.ops.recurrent import GateActivation


class Qwen4ExpForCausalLM:
    """Norms store the weight minus 1, except the one after a delta rule. Implements `StagedModel`."""

    SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        if config["hidden_act"] != "silu":
            raise SettingError(f"{spec.name}: hidden_act must be silu, got {config['hidden_act']!r}.")
        self._num_streams = config["hc_count"]
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        make_mlp = mixture_maker(spec, context, renormalize=config["norm_topk_prob"])
        attends, ngrams = _attending_layers(spec), sorted(set(config.get("ple_layer_ids") or ()))
        self.kv_layers: list[AttentionKV] = []
        self.state_layers: list[LayerState] = []
        self._layers: list[_Layer] = []
        for index in context.layers:
            ngram: NGramLayer | None = None
            if index + 1 in ngrams:
                ngram = NGramLayer(
                    context, f"model.layers.{index}.ple", len(self.state_layers), size, _ngram_shape(spec),
                    _norm(spec), order=ngrams.index(index + 1), num_streams=self._num_streams,
                )  # fmt: skip
                self.state_layers.append(ngram.state)
            number = len(self.kv_layers if attends[index] else self.state_layers)
            place = LayerPlace(index, number, is_last=index == spec.num_layers - 1)
            mixer = _attention(spec, context, place, rotary) if attends[index] else _delta(spec, context, place)
            if isinstance(mixer, IndexedAttention):
                self.kv_layers += mixer.kv_layers
            else:
                self.state_layers.append(mixer.state)
            self._layers.append(_Layer(spec, context, place, ngram, mixer, make_mlp(place)))
        self._embed, self._head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        self._collapse: StreamMixer | None = None
        if context.layers.stop == spec.num_layers:
            self._collapse = _mixer(spec, context, "model.hyper_connection_mixer")
        self.num_layer_outputs = 0
        self.activation_size = max(layer.activation_size for layer in self._layers) + 3 * self._num_streams * size

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        if step.received is None:
            x = self._embed(token_ids, step)
            streams = x.unsqueeze(1).expand(-1, self._num_streams, -1).contiguous()
        else:
            streams = step.received.view(len(token_ids), self._num_streams, -1)
        places = StepPlaces(step)
        for layer in self._layers:
            streams = layer(streams, token_ids, step, places)
        if self._collapse is None:
            return hand_over(streams)
        return self._collapse(streams)[0]

    def handover_size(self, hidden_size: int) -> int:
        """Counts all streams."""
        return self._num_streams * hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class _Layer:
    """N-grams, if the layer has them; then a mixer of tokens, then experts. Each reads a mean of the streams."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        place: LayerPlace,
        ngram: NGramLayer | None,
        mixer: IndexedAttention | GatedDeltaNet,
        mlp: FeedForward,
    ) -> None:
        self._ngram = ngram
        self._mixer = mixer
        self._mlp = mlp
        self._before_mixer = _mixer(spec, context, f"{place.name}.attn_hyper_connection", injects=True)
        self._before_mlp = _mixer(spec, context, f"{place.name}.mlp_hyper_connection", injects=True)
        blocks = (self._ngram, self._mixer, self._mlp)
        self.activation_size = self._before_mlp.activation_size + max(
            block.activation_size for block in blocks if block is not None
        )

    def __call__(self, streams: Tensor, token_ids: Tensor, step: StepContext, places: StepPlaces) -> Tensor:
        """Maps `streams` [num_tokens, num_streams, hidden]; the last layer returns only those of the wanted tokens."""
        mixer = self._mixer
        if self._ngram is not None:
            streams = self._ngram(streams, token_ids, step)
        x, factors = self._before_mixer(streams)
        if isinstance(mixer, IndexedAttention):
            mixer.select(x, step, places)
        out = mixer(x, step)
        streams = mixer.outputs_of(streams.flatten(1), step).unflatten(1, streams.shape[1:])
        streams = inject(streams, mixer.outputs_of(factors, step), out)
        x, factors = self._before_mlp(streams)
        return inject(streams, factors, self._mlp(x))


def _mixer(spec: ModelSpec, context: ModelContext, name: str, *, injects: bool = False) -> StreamMixer:
    config = spec.hf_config
    return StreamMixer(
        context, name, spec.hidden_size, _norm(spec), num_streams=config["hc_count"],
        rank=config["hc_lowrank"], injects=injects,
    )  # fmt: skip


def _attention(spec: ModelSpec, context: ModelContext, place: LayerPlace, rotary: RotaryEmbedding) -> IndexedAttention:
    bias = spec.hf_config["attention_bias"]
    return IndexedAttention(
        context, place, attention_shape(spec), rotary, _index_shape(spec), qk_norm=_norm(spec), qkv_bias=bias,
        output_bias=bias, is_gated=True,
    )  # fmt: skip


def _delta(spec: ModelSpec, context: ModelContext, place: LayerPlace) -> GatedDeltaNet:
    shape = delta_shape(spec)
    parts = parts_one_by_one(context, f"{place.name}.linear_attn", shape)
    return GatedDeltaNet(context, place, shape, parts, _norm(spec).eps, gate_activation=_output_gate(spec))


def _norm(spec: ModelSpec) -> NormStyle:
    return NormStyle(spec.hf_config["rms_norm_eps"], is_offset=True)


def _output_gate(spec: ModelSpec) -> GateActivation:
    gates: dict[str | None, GateActivation] = {None: "silu", "silu": "silu", "sigmoid": "sigmoid"}
    name = spec.hf_config.get("output_gate_type")
    if name not in gates:
        raise ModelLoadError(f"{spec.name}: output_gate_type must be silu or sigmoid, got {name!r}.")
    return gates[name]


def _attending_layers(spec: ModelSpec) -> Sequence[bool]:
    """Returns True for each layer with attention: those that `layer_types` names, or every fourth.

    Raises:
        ModelLoadError: config.json names other kinds of layers, or too few.
    """
    config, num_layers = spec.hf_config, spec.num_layers
    interval = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "indexed_attention" for index in range(num_layers)
    ]
    kinds = {"linear_attention": False, "indexed_attention": True, "full_attention": True}
    if len(types) < num_layers or not set(types) <= set(kinds):
        raise ModelLoadError(
            f"config.json of {spec.name}: layer_types must name {', '.join(kinds)} for each of {num_layers} layers; "
            f"got {types}."
        )
    return [kinds[each] for each in types[:num_layers]]


def _index_shape(spec: ModelSpec) -> BlockIndexerShape:
    budget, rate = size_of(spec, "indexer_budget"), size_of(spec, "indexer_compress_ratio")
    if spec.hf_config.get("indexer_kv_heads", 1) != 1 or budget % rate:
        raise ModelLoadError(
            f"config.json of {spec.name}: indexer_kv_heads must be 1, and indexer_budget ({budget}) a multiple of "
            f"indexer_compress_ratio ({rate})."
        )
    heads, head_dim = size_of(spec, "indexer_n_heads"), size_of(spec, "indexer_head_dim")
    return BlockIndexerShape(spec.hidden_size, heads, head_dim, rate, budget // rate)


def _ngram_shape(spec: ModelSpec) -> NGramShape:
    config: dict[str, Any] = spec.hf_config
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    size, longest, num_tables = (
        config.get("ple_embed_dim") or spec.hidden_size, config["ngram_size"], config["heads_per_ngram"],
    )  # fmt: skip
    if not isinstance(end, int) or longest < 2 or num_tables < 1 or size % ((longest - 1) * num_tables):
        raise ModelLoadError(
            f"config.json of {spec.name}: with ple_layer_ids, eos_token_id must be set, and ple_embed_dim ({size}) a "
            f"multiple of heads_per_ngram ({num_tables}) times ngram_size - 1 ({longest - 1})."
        )
    return NGramShape(
        size=size,
        longest=longest,
        num_tables=num_tables,
        table_size=config["ngram_vocab_size_base"],
        multiple=config["make_ngram_vocab_size_divisible_by"],
        vocab_size=spec.vocab_size,
        seed=config["seed"],
        end=end,
        conv_width=config["ple_conv_kernel_size"],
    )
