"""DeBERTa v2 and v3 (arXiv:2006.03654, 2111.09543): attention that disentangles content and relative position."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import AttentionShape
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import activation_of, size_of
from quire.executor.models.encoders.encoder import (
    Encoder,
    EncoderEmbedding,
    EncoderLayer,
    PostNormLayer,
    encoder_shape,
    position_rows,
    projection,
    renamed,
)
from quire.executor.models.encoders.heads import WORDS, DenseForm, HeadForms, read_heads, read_words
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.rearranged import Piece
from quire.ops.backend import AttentionForm, PairBias

_PIECES = {
    "self_attn.q_proj": Piece("attention.self.query_proj"),
    "self_attn.k_proj": Piece("attention.self.key_proj"),
    "self_attn.v_proj": Piece("attention.self.value_proj"),
    "self_attn.o_proj": Piece("attention.output.dense"),
    "self_attn.pos_key_proj": Piece("attention.self.pos_key_proj"),
    "self_attn.pos_query_proj": Piece("attention.self.pos_query_proj"),
    "attention_norm": Piece("attention.output.LayerNorm"),
    "mlp.up_proj": Piece("intermediate.dense"),
    "mlp.down_proj": Piece("output.dense"),
    "mlp_norm": Piece("output.LayerNorm"),
}
_ENDS = {
    WORDS: "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "narrow": "embeddings.embed_proj",
    "embedding_norm": "embeddings.LayerNorm",
    "distances": "encoder.rel_embeddings",
    "distance_norm": "encoder.LayerNorm",
    "conv": "encoder.conv.conv",
    "conv_norm": "encoder.conv.LayerNorm",
}
_CONV_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu, "relu": F.relu}


class DebertaV2Model(Encoder):
    """BERT with disentangled attention; a convolution may follow the first layer."""

    SIZES = ("intermediate_size", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        context = renamed(context, ("deberta",), "encoder.layer.{}", _PIECES, _ENDS)
        style = NormStyle(config.get("layer_norm_eps", 1e-7), is_centred=True, has_bias=True)
        forms = HeadForms(DenseForm("pooler.dense", _pooler_activation(spec)))
        width, num_types = config.get("embedding_size", size), config.get("type_vocab_size", 0)
        words = read_words(spec, context, forms, width)
        positions = None
        if config.get("position_biased_input", True):
            positions = position_rows(context, "positions.weight", size_of(spec, "max_position_embeddings"), width)
        relative = _RelativePositions.of(spec, context, style)

        def norm(name: str) -> Norm:
            return style.layer(context, name, size)

        def layer(index: int) -> EncoderLayer:
            name = f"model.layers.{index}"
            attention = _DisentangledAttention(context, f"{name}.self_attn", encoder_shape(spec), relative)
            mlp = MLP(
                context,
                f"{name}.mlp",
                size,
                size_of(spec, "intermediate_size"),
                activation_of(spec, "hidden_act", "gelu"),
            )
            post_norm = PostNormLayer(attention, norm(f"{name}.attention_norm"), mlp, norm(f"{name}.mlp_norm"))
            has_conv = index == 0 and config.get("conv_kernel_size", 0) > 0
            return _ConvolvedLayer(spec, context, post_norm, norm("conv_norm")) if has_conv else post_norm

        super().__init__(
            EncoderEmbedding(
                context,
                words,
                positions=positions,
                types=context.read("types.weight", (num_types, width)) if num_types else None,
                norm=norm("embedding_norm"),
                before_norm=None if width == size else projection(context, "narrow", width, size, bias=False),
            ),
            [layer(index) for index in range(spec.num_layers)],
            read_heads(spec, context, words, forms, style),
        )


def _pooler_activation(spec: ModelSpec) -> Any:
    return activation_of(spec, "pooler_hidden_act", "gelu")


class _RelativePositions:
    """The embeddings of relative positions, which all layers share, and the bucket of each distance.

    Attributes:
        rows: [2 * span, hidden].
        kinds: "c2p", for keys by position; "p2c", for queries by position.
        shares_projections: layers project them as they do tokens.
        of_queries: and `of_keys`: [2 * reach + 1] int64, as the buckets of `PairBias`.
    """

    def __init__(self, spec: ModelSpec, context: ModelContext, rows: Tensor, span: int, kinds: list[str]) -> None:
        config = spec.hf_config
        self.rows = rows
        self.kinds = kinds
        self.shares_projections = config.get("share_att_key", False)
        farthest = _farthest(spec)
        reach = max(1, context.max_model_len - 1)
        distances = torch.arange(-reach, reach + 1)  # key less query
        buckets = _buckets(-distances, config.get("position_buckets", -1), farthest)
        top = 2 * span - 1
        self.of_queries = (buckets + span).clamp(0, top).to(context.device)
        # A query's position as its key sees it: the distance the other way, negated.
        self.of_keys = (span - _buckets(distances, config.get("position_buckets", -1), farthest)).clamp(0, top)
        self.of_keys = self.of_keys.to(context.device)

    @classmethod
    def of(cls, spec: ModelSpec, context: ModelContext, style: NormStyle) -> "_RelativePositions | None":
        """Reads the embeddings; None: the model has none.

        Raises:
            ModelLoadError: an unknown kind of attention to positions.
        """
        config, stated = spec.hf_config, spec.hf_config.get("pos_att_type") or []
        kinds = [kind.strip() for kind in stated.lower().split("|")] if isinstance(stated, str) else list(stated)
        if not config.get("relative_attention", False):
            return None
        if unknown := set(kinds) - {"c2p", "p2c"}:
            raise ModelLoadError(f"config.json: pos_att_type may name c2p and p2c, got {', '.join(sorted(unknown))}.")
        buckets = config.get("position_buckets", -1)
        span = buckets if buckets > 0 else _farthest(spec)
        rows = context.read("distances.weight", (2 * span, spec.hidden_size))
        if "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower():
            rows = _normalized(context, rows, style)
        return cls(spec, context, rows, span, kinds)


def _normalized(context: ModelContext, rows: Tensor, style: NormStyle) -> Tensor:
    weight, bias = (context.read(f"distance_norm.{name}", rows.shape[1:]) for name in ("weight", "bias"))
    if rows.is_meta:
        return rows
    return F.layer_norm(rows.float(), rows.shape[1:], weight.float(), bias.float(), style.eps).to(rows.dtype)


def _farthest(spec: ModelSpec) -> int:
    stated = spec.hf_config.get("max_relative_positions", -1)
    return stated if stated > 0 else size_of(spec, "max_position_embeddings")


def _buckets(distances: Tensor, num_buckets: int, farthest: int) -> Tensor:
    """Maps `distances` [n] int64 to buckets. Beyond half of `num_buckets`, they grow with a distance's logarithm."""
    if num_buckets <= 0 or farthest <= 0:
        return distances
    middle = num_buckets // 2
    size = torch.where(distances.abs() < middle, middle - 1, distances.abs())
    scale = math.log((farthest - 1) / middle)
    far = ((size / middle).log() / scale * (middle - 1)).ceil() + middle
    return torch.where(size <= middle, distances, far.long() * distances.sign())


class _DisentangledAttention(SequenceAttention):
    """Scores have terms of a query with a key's position, and of a key with a query's."""

    def __init__(
        self, context: ModelContext, name: str, shape: AttentionShape, relative: _RelativePositions | None
    ) -> None:
        kinds = [] if relative is None else relative.kinds
        self._scale = (shape.head_dim * (1 + len(kinds))) ** -0.5
        super().__init__(context, name, shape, form=AttentionForm(self._scale))
        self._relative = relative
        self._keys: Tensor | None = None
        self._queries: Tensor | None = None
        if relative is None:
            return
        self.activation_size += len(kinds) * self.num_heads * len(relative.rows)  # of each token's terms
        own = {"c2p": ("pos_key_proj", "k_proj"), "p2c": ("pos_query_proj", "q_proj")}
        rows = {kind: self._rows(context, f"{name}.{own[kind][relative.shares_projections]}", shape) for kind in kinds}
        self._keys, self._queries = rows.get("c2p"), rows.get("p2c")

    def _rows(self, context: ModelContext, name: str, shape: AttentionShape) -> Tensor:
        """Returns the projected positions of the rank's heads, scaled: [num_heads, head_dim, 2 * span]."""
        assert self._relative is not None
        size = shape.num_heads * shape.head_dim
        rows, shard = self._relative.rows, context.shard(0, size, "query outputs")
        weight = context.read_dequantized(LinearPart(name, size, shard), shape.hidden_size)
        bias = context.read(f"{name}.bias", (size,), shard)
        if rows.is_meta:
            return rows.new_empty(self.num_heads, shape.head_dim, len(rows))
        projected = F.linear(rows.float(), weight.float(), bias.float()) * self._scale
        return projected.unflatten(1, (self.num_heads, shape.head_dim)).permute(1, 2, 0).to(rows.dtype).contiguous()

    def _form_of(self, heads: Tensor) -> AttentionForm:
        if self._relative is None:
            return self._form
        q, k, _ = heads.split(self.num_heads, dim=1)
        by_query, by_key = self._terms(q, self._keys), self._terms(k, self._queries)
        return self._form._replace(
            pair_bias=PairBias(by_query, by_key, self._relative.of_queries, self._relative.of_keys)
        )  # fmt: skip

    def _terms(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """[num_tokens, num_heads, head_dim] → [num_tokens, num_heads, 2 * span]; without rows, zeros."""
        assert self._relative is not None
        if rows is None:
            return x.new_zeros(*x.shape[:2], len(self._relative.rows))
        return torch.bmm(x.transpose(0, 1), rows).transpose(0, 1)


class _ConvolvedLayer:
    """Adds a convolution of the layer's input, along each sequence, to its output: `norm(layer(x) + act(conv(x)))`."""

    def __init__(self, spec: ModelSpec, context: ModelContext, layer: EncoderLayer, norm: Norm) -> None:
        config, size = spec.hf_config, spec.hidden_size
        self.activation_size = layer.activation_size + 2 * size
        width, self._groups = config["conv_kernel_size"], config.get("conv_groups", 1)
        name = config.get("conv_act", "tanh")
        if name not in _CONV_ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: conv_act {name!r} is not supported, only {', '.join(_CONV_ACTIVATIONS)}."
            )
        self._activate = _CONV_ACTIVATIONS[name]
        self._weight = context.read("conv.weight", (size, size // self._groups, width))
        self._bias = context.read("conv.bias", (size,))
        self._layer, self._norm = layer, norm

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        width = self._weight.shape[2]
        parts = [
            F.conv1d(rows.t().unsqueeze(0), self._weight, self._bias, padding=(width - 1) // 2, groups=self._groups)
            .squeeze(0)
            .t()
            for rows in x.split(step.sequences.query_lens.tolist())
        ]
        convolved = self._activate(torch.cat(parts)).contiguous()
        return self._norm.add(self._layer(x, step), convolved)[0]
