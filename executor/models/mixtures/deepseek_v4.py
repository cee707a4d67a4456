"""DeepSeek V4: compressed attention, hyper-connections, and experts that the first layers choose by a token's id."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.compressed import CompressedAttention, CompressedShape
from quire.executor.layers.attention.compressed_rows import StepPlaces
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.experts import Experts
from quire.executor.layers.experts.mixture import read_router
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.residual_streams.hyper_connections import HyperConnection, StreamHead
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import SettingError, hand_over, size_of, vocabulary_ends
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.activations import SILU_LIMIT
from quire.ops.routing import Routing

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}
_KINDS = {0: _SLIDING, **{rate: kind for kind, rate in _RATES.items()}}
_ROTATED = 0.125
"""The rotated part of a head, if config.json has neither a fraction nor a size."""
_NUM_HASHED = 3


class DeepseekV4ForCausalLM:
    """Implements `quire.executor.models.base.StagedModel`."""

    SIZES = ("moe_intermediate_size", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        if config["swiglu_limit"] != SILU_LIMIT or config.get("mlp_bias") or config.get("attention_bias"):
            raise SettingError(f"{spec.name}: swiglu_limit must be {SILU_LIMIT:g}, and biases false.")
        context = replace(context, weights=_own_names(context))
        rotaries = {kind: _rotary(spec, context, kind) for kind in ("main", "compress")}
        shapes = _shapes(spec)
        hashed = _hashed_layers(spec)
        if not context.is_first_stage and any(hashed[index] for index in context.layers):
            raise ModelLoadError(
                f"{spec.name}: layers that choose experts by a token's id must be in the first pipeline stage; give it "
                f"{sum(hashed)} layers or more in QUIRE_PP_LAYER_PARTITION."
            )
        self._layers: list[_Layer] = []
        number = 0
        for index in context.layers:
            place = LayerPlace(index, number, is_last=index == spec.num_layers - 1)
            rotary = rotaries["main" if shapes[index].rate is None else "compress"]
            attention = CompressedAttention(context, place, shapes[index], rotary, _norm(spec))
            number += len(attention.kv)
            self._layers.append(_Layer(spec, context, place, attention, is_hashed=hashed[index]))
        self._embed, self._head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        self._num_streams = config["hc_mult"]
        self._collapse = (
            StreamHead(context, _head_name(context), size, **_streams(config)) if _is_last(spec, context) else None
        )
        self._norm = RMSNorm(context, "model.norm", size, _norm(spec))
        self.kv_layers = [kv for layer in self._layers for kv in layer.attention.kv]
        self.state_layers = ()
        blocks = max(layer.attention.activation_size + layer.mlp.activation_size for layer in self._layers)
        self.num_layer_outputs = 0
        self.activation_size = blocks + 4 * self._num_streams * size  # streams are computed in float32

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
        return self._norm(self._collapse(streams))

    def handover_size(self, hidden_size: int) -> int:
        """Counts all streams."""
        return self._num_streams * hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class _Layer:
    """Attention and experts, each between a collapse of the streams and their expansion."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        place: LayerPlace,
        attention: CompressedAttention,
        *,
        is_hashed: bool,
    ) -> None:
        size, name, streams = spec.hidden_size, place.name, _streams(spec.hf_config)
        iterations = spec.hf_config["hc_sinkhorn_iters"]
        self.attention = attention
        self.mlp = _Mixture(spec, context, f"{name}.ffn", is_hashed=is_hashed)
        self._place = place
        self._around_attention = HyperConnection(context, f"{name}.hc_attn", size, iterations=iterations, **streams)
        self._around_mlp = HyperConnection(context, f"{name}.hc_ffn", size, iterations=iterations, **streams)
        self._before_attention = RMSNorm(context, f"{name}.attn_norm", size, _norm(spec))
        self._before_mlp = RMSNorm(context, f"{name}.ffn_norm", size, _norm(spec))

    def __call__(self, streams: Tensor, token_ids: Tensor, step: StepContext, places: StepPlaces) -> Tensor:
        """Maps `streams` [num_tokens, num_streams, hidden]; the last layer returns only those of the wanted tokens."""
        share, mix, x = self._around_attention.collapse(streams)
        own = [places.of(self._place.number + number) for number in range(len(self.attention.kv))]
        out = self.attention(self._before_attention(x), step, own)
        if self._place.is_last and step.wanted is not None:
            wanted = step.wanted.tokens
            streams, share, mix, token_ids = (each.index_select(0, wanted) for each in (streams, share, mix, token_ids))
        streams = self._around_attention.expand(streams, share, mix, out)
        share, mix, x = self._around_mlp.collapse(streams)
        return self._around_mlp.expand(streams, share, mix, self.mlp(self._before_mlp(x), token_ids))


class _Mixture:
    """Experts chosen by their scores, or by the token's id, and a shared one."""

    def __init__(self, spec: ModelSpec, context: ModelContext, name: str, *, is_hashed: bool) -> None:
        config, hidden_size = spec.hf_config, spec.hidden_size
        if config["scoring_func"] != "sqrtsoftplus" or not config["norm_topk_prob"]:
            raise SettingError(f"{spec.name}: scoring_func must be sqrtsoftplus, and norm_topk_prob true.")
        size = size_of(spec, "moe_intermediate_size")
        shape = ExpertShape(size_of(spec, "n_routed_experts", "num_local_experts"), hidden_size, size)
        top_k, scale = size_of(spec, "num_experts_per_tok"), config["routed_scaling_factor"]
        routing = Routing(top_k, "sqrt_softplus", renormalize=True, scale=scale)
        correction = None if is_hashed else f"{name}.gate.bias"
        self._ops = context.ops
        self._group = context.group
        self._router = read_router(context, f"{name}.gate", routing, shape, correction=correction)
        self._table: Tensor | None = None
        if is_hashed:
            self._table = context.read(f"{name}.gate.tid2eid", (spec.vocab_size, top_k), dtype=torch.int64)
        self._experts = Experts(
            context, SeparateExperts(f"{name}.experts.{{}}", "w1", "w3", "w2"), shape, top_k, "clamped_silu"
        )
        self._shared = GatedMLP(context, f"{name}.shared_experts", hidden_size, size, "clamped_silu")
        self.activation_size = self._experts.activation_size + self._shared.activation_size

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """`x` [num_tokens, hidden] → [num_tokens, hidden]."""
        ids, weights = (
            self._ops.route(x, self._router) if self._table is None else self._hashed(x, self._table[token_ids])
        )
        total = self._ops.add(self._shared.partial(x), self._experts.partial(x, ids, weights))
        return self._group.all_reduce(total)

    def _hashed(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts `ids` [num_tokens, top_k] and their weights, as `Backend.route` does for those that it
        chooses.
        """
        routing = self._router.routing
        weights = F.softplus(F.linear(x.float(), self._router.weight)).sqrt().gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True).clamp_(min=routing.floor) * routing.scale


def _own_names(context: ModelContext) -> RearrangedWeights:
    """Maps the checkpoint's names of common layers to those of other families."""
    shared = {f"ffn.shared_experts.{kind}_proj": f"w{number}" for kind, number in (("gate", 1), ("down", 2), ("up", 3))}
    pieces = {name: Piece(f"ffn.shared_experts.{stored}") for name, stored in shared.items()}
    ends = {"lm_head": "head"}
    if context.find("model.embed.weight") is not None:
        ends["model.embed_tokens"] = "model.embed"
    return RearrangedWeights(context.weights, pieces, ends=ends)


def _head_name(context: ModelContext) -> str:
    """Returns the stored name of `StreamHead`'s weights, which DeepSeek and Transformers name differently."""
    return "model.hc_head" if context.find("model.hc_head_fn") is not None else "model.hc_head.hc"


def _norm(spec: ModelSpec) -> NormStyle:
    return NormStyle(spec.hf_config["rms_norm_eps"], is_wide=True)


def _streams(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `HyperConnection` and `StreamHead` from config.json."""
    return {
        "num_streams": config["hc_mult"],
        "eps": config["hc_eps"],
        "norm_eps": config["rms_norm_eps"],
    }


def _rotary(spec: ModelSpec, context: ModelContext, kind: str) -> RotaryEmbedding:
    """Builds the rotation of layers without compressed rows ("main") or with them ("compress").

    config.json has the two kinds' settings separately or together.
    """
    config = spec.hf_config
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind in settings:
        settings = settings[kind]
    else:
        sized = config.get("qk_rope_head_dim")
        rotated = config.get("partial_rotary_factor") or (sized / spec.head_dim if sized else _ROTATED)
        together = {**settings, "partial_rotary_factor": rotated, "rope_theta": config["rope_theta"]}
        theta = config["compress_rope_theta"]
        plain = {"rope_type": "default"}
        settings = (
            {**together, **plain} if kind == "main" else {"attention_factor": 1.0, **together, "rope_theta": theta}
        )
    return RotaryEmbedding(context, {**config, "rope_parameters": settings}, spec.head_dim)


def _shapes(spec: ModelSpec) -> list[CompressedShape]:
    """Reads the sizes of each layer's attention.

    Raises:
        ModelLoadError: config.json names other kinds of layers, or too few.
    """
    config, num_layers = spec.hf_config, spec.num_layers
    kinds = config.get("layer_types") or [_KINDS.get(rate, rate) for rate in config.get("compress_ratios") or ()]
    kinds = kinds or [_SPARSE if i % 2 and i >= 2 else _HEAVY for i in range(num_layers)]
    if len(kinds) < num_layers or not set(kinds) <= {_SLIDING, _SPARSE, _HEAVY}:
        raise ModelLoadError(
            f"config.json of {spec.name}: layer_types must name {_SLIDING}, {_SPARSE} or {_HEAVY} for each of "
            f"{num_layers} layers, or compress_ratios {', '.join(map(str, _KINDS))}; got {kinds}."
        )
    rates = {**_RATES, **(config.get("compress_rates") or {})}
    index = {
        "index_heads": config["index_n_heads"],
        "index_head_dim": config["index_head_dim"],
        "index_top_k": config["index_topk"],
    }
    return [
        CompressedShape(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_attention_heads,
            head_dim=spec.head_dim,
            q_lora_rank=size_of(spec, "q_lora_rank"),
            window=config["sliding_window"],
            num_groups=size_of(spec, "o_groups"),
            group_rank=size_of(spec, "o_lora_rank"),
            rate=rates.get(kind),
            **(index if kind == _SPARSE else {}),
        )
        for kind in kinds[:num_layers]
    ]


def _hashed_layers(spec: ModelSpec) -> list[bool]:
    """Returns True for each layer that chooses experts by a token's id.

    Raises:
        ModelLoadError: config.json names other kinds of experts, or too few.
    """
    config, num_layers = spec.hf_config, spec.num_layers
    kinds = config.get("mlp_layer_types")
    if not kinds:
        return [index < config.get("num_hash_layers", _NUM_HASHED) for index in range(num_layers)]
    if len(kinds) < num_layers or not set(kinds) <= {"hash_moe", "moe"}:
        raise ModelLoadError(
            f"config.json of {spec.name}: mlp_layer_types must name hash_moe or moe for each of {num_layers} layers; "
            f"got {kinds}."
        )
    return [kind == "hash_moe" for kind in kinds[:num_layers]]


def _is_last(spec: ModelSpec, context: ModelContext) -> bool:
    return context.layers.stop == spec.num_layers
