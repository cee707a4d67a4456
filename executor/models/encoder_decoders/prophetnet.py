"""ProphetNet (arXiv:2001.04063): a second stream of the decoder predicts the next token.

Each of the decoder's tokens is two rows side by side, [num_tokens, 2 * hidden]. The main stream reads the token. The
predicting stream knows only its place; it attends to the main stream and to itself, and the head reads it. Streams that
predict tokens after the next are for training, and nothing reads them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.decoder import (
    FeedForward,
    activation_of,
    attention_shape,
    layer_places,
    size_of,
    vocabulary_ends,
)
from quire.executor.models.encoder_decoders.encoder_decoder import (
    AddedPositions,
    EncoderDecoder,
    PostNormCrossLayer,
    cross_place,
    encoder_context,
    encoder_spec,
)
from quire.executor.models.encoders.encoder import Encoder, PostNormLayer, distance_buckets, encoder_shape
from quire.executor.models.encoders.heads import Heads
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import Backend, PairBias

_PIECES = {
    "attention_norm": Piece("self_attn_layer_norm"),
    "cross_norm": Piece("cross_attn_layer_norm"),
    "mlp.up_proj": Piece("feed_forward.intermediate"),
    "mlp.down_proj": Piece("feed_forward.output"),
    "mlp_norm": Piece("feed_forward_layer_norm"),
    **{
        f"{block}.{ours}_proj": Piece(f"{block}.{theirs}_proj")
        for block in ("self_attn", "cross_attn")
        for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))
    },
}
_STYLE = NormStyle(1e-5, is_centred=True, has_bias=True)
_NUM_STREAMS = 2


class ProphetNetForConditionalGeneration(EncoderDecoder):
    """Norms after blocks and after the embedding; learned positions; biases by distance that each token computes."""

    SIZES = ("decoder_ffn_dim", "encoder_ffn_dim")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        decoder = _renamed(context, "prophetnet.decoder")
        embed, head = vocabulary_ends(spec, decoder, is_tied=config.get("tie_word_embeddings", True))
        encoder = _encoder(spec, _renamed(encoder_context(spec, context), "prophetnet.encoder"), embed)
        inner, activation = size_of(spec, "decoder_ffn_dim"), activation_of(spec, "activation_function", "gelu")

        def norm(place: LayerPlace, name: str) -> Norm:
            return _STYLE.layer(decoder, f"{place.name}.{name}", size)

        layers: list[PostNormCrossLayer] = []
        before: Norm | None = None
        for place in layer_places(spec, decoder):
            mlp = MLP(decoder, f"{place.name}.mlp", size, inner, activation)
            layers.append(
                PostNormCrossLayer(
                    None if before is None else _EachStream(before),
                    _StreamAttention(spec, decoder, place),
                    _EachStream(norm(place, "attention_norm")),
                    _StreamCrossAttention(decoder, cross_place(place, spec), attention_shape(spec), bias=True),
                    _EachStream(norm(place, "cross_norm")),
                    _StreamMLP(mlp),
                )
            )
            before = norm(place, "mlp_norm")
        assert before is not None, "a decoder has layers"
        super().__init__(encoder, _StreamEmbedding(spec, decoder, embed), layers, _PredictingStream(before), head)


class _EachStream:
    """A norm of both streams."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(_rows(x)).view_as(x)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        normed, total = self._norm.add(_rows(x), None if residual is None else _rows(residual))
        return normed.view_as(x), total.view_as(x)


class _PredictingStream:
    """A norm of the predicting stream, which leaves out the other: [num_tokens, 2 * hidden] → [num_tokens, hidden]."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(_predicting(x))

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._norm.add(_predicting(x), None if residual is None else _predicting(residual))


class _StreamMLP:
    """The feed-forward network of both streams."""

    def __init__(self, mlp: FeedForward) -> None:
        self.activation_size = _NUM_STREAMS * mlp.activation_size
        self._mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        return self._mlp(_rows(x)).view_as(x)


class _StreamEmbedding:
    """Sums tokens and positions for the main stream; the predicting one has the next position, and no token."""

    def __init__(self, spec: ModelSpec, context: ModelContext, embed: Embedding) -> None:
        size, first = spec.hidden_size, _first_position(spec)
        positions = _positions(spec, context)
        stream = context.read("streams.weight", (size_of(spec, "ngram"), size))[-1]
        last = first + context.max_model_len
        self._main = positions[first:last]
        self._predicting = positions[first + 1 : last + 1].clone().add_(stream)
        self._ops: Backend = context.ops
        self._embed = embed
        self._norm = _STYLE.layer(context, "embedding_norm", size)

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        main = self._ops.add(self._ops.take_rows(self._main, step.positions), self._embed(token_ids, step))
        predicting = self._ops.take_rows(self._predicting, step.positions)
        return self._norm(torch.stack((main, predicting), dim=1).flatten(0, 1)).view(len(token_ids), -1)


class _StreamAttention(Attention):
    """Attention of both streams to the keys and values of the main one, which are cached; those of the predicting
    stream are seen by their own token alone. A token's biases by distance are a projection of its hidden state.
    """

    def __init__(self, spec: ModelSpec, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(context, place, attention_shape(spec), None, qkv_bias=True, output_bias=True)
        count, all_heads = size_of(spec, "num_buckets"), spec.num_attention_heads
        own = context.shard(0, all_heads, "attention heads")
        name = f"{place.name}.self_attn.relative_pos_embeddings"
        parts = [
            LinearPart(name, count * all_heads, Shard(0, bucket * all_heads + own.start, bucket * all_heads + own.stop))
            for bucket in range(count)
        ]
        self._biases = ColumnLinear(context, parts, spec.hidden_size, bias=True)
        reach = min(size_of(spec, "relative_max_distance"), max(1, context.max_model_len))
        distances = torch.arange(reach + 1)
        buckets = distance_buckets(
            torch.stack((distances, distances + 1)), count, size_of(spec, "relative_max_distance")
        )
        self._buckets = buckets.to(context.device)  # by stream; the predicting one's keys are one position further away
        self._distances = (-torch.arange(-reach, reach + 1)).clamp(min=0).to(context.device)
        self.activation_size = 2 * self.activation_size + 2 * self._num_heads * (count + 2 * (reach + 1))

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[num_tokens, 2 * hidden] → [num_outputs, 2 * hidden], for the tokens that `outputs_of` selects."""
        pages, group = step.caches[self._place.number]
        q, k, v = self._project(_rows(x)).view(len(x), _NUM_STREAMS, 3, self._num_heads, self._head_dim).unbind(2)
        slots = step.attention[group].slot_mapping
        self._ops.write_kv(k[:, 0].contiguous(), v[:, 0].contiguous(), pages, slots, self._cache_scales)
        biases = self._biases(_rows(x)).view(len(x), _NUM_STREAMS, -1, self._num_heads)
        q, own_k, own_v, biases = (self._wanted(rows, step) for rows in (q, k[:, 1], v[:, 1], biases))
        by_distance = torch.stack([biases[:, stream, self._buckets[stream]] for stream in range(_NUM_STREAMS)], dim=-1)
        pair_bias = PairBias(by_distance.permute(0, 2, 3, 1).flatten(1, 2), None, self._distances, None)
        batch = (step.wanted or step).attention[group] if self._place.is_last else step.attention[group]
        seen = self._ops.partial_attention(_as_heads(q), pages, batch, self._form._replace(pair_bias=pair_bias))
        out = self._ops.merge_attention([seen, self._own(q[:, 1], own_k, own_v, biases[:, 1, 0])])
        return self._output(_as_rows(out)).view(len(q), -1)

    def _own(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what each token of the predicting stream sees of itself, as `Backend.partial_attention` does.

        `q`, `k` and `v` are [num_tokens, num_heads, head_dim], `bias` [num_tokens, num_heads].
        """
        scores = (q.float() * k.float()).sum(dim=-1) * self._form.scale + bias.float()
        values = torch.stack((torch.zeros_like(v), v), dim=2).flatten(1, 2)
        return values, torch.stack((torch.full_like(scores, float("-inf")), scores), dim=2).flatten(1, 2)

    def _wanted(self, rows: Tensor, step: StepContext) -> Tensor:
        if self._place.is_last and step.wanted is not None:
            return rows.index_select(0, step.wanted.tokens)
        return rows


class _StreamCrossAttention(CrossAttention):
    """Attention of both streams to the encoder's output."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        pages, group = step.caches[self._place.number]
        wanted = step.wanted if self._place.is_last else None
        q = self._q(_rows(x)).view(len(x), _NUM_STREAMS, -1, self._head_dim)
        out = self._ops.attention(_as_heads(q), pages, (wanted or step).attention[group], self._form)
        return self._output(_as_rows(out)).view_as(x)


def _encoder(spec: ModelSpec, context: ModelContext, embed: Embedding) -> Encoder:
    size = spec.hidden_size
    own = encoder_spec(spec, size_of(spec, "num_encoder_layers"), size_of(spec, "num_encoder_attention_heads"))
    shape = replace(encoder_shape(own), head_dim=size // own.num_attention_heads)
    inner, activation = size_of(spec, "encoder_ffn_dim"), activation_of(spec, "activation_function", "gelu")

    def layer(index: int) -> PostNormLayer:
        name = f"model.layers.{index}"
        return PostNormLayer(
            SequenceAttention(context, f"{name}.self_attn", shape),
            _STYLE.layer(context, f"{name}.attention_norm", size),
            MLP(context, f"{name}.mlp", size, inner, activation),
            _STYLE.layer(context, f"{name}.mlp_norm", size),
        )

    table = _positions(spec, context)
    places = torch.arange(context.max_model_len, device=table.device) + _first_position(spec)
    rows = table[places.clamp(max=len(table) - 1)]  # inputs longer than the table repeat its last row
    positioned = AddedPositions(context.ops, embed, rows, _STYLE.layer(context, "embedding_norm", size))
    return Encoder(positioned, [layer(index) for index in range(own.num_layers)], Heads())


def _positions(spec: ModelSpec, context: ModelContext) -> Tensor:
    return context.read("positions.weight", (size_of(spec, "max_position_embeddings"), spec.hidden_size))


def _first_position(spec: ModelSpec) -> int:
    """Returns the position of the first token, which is behind that of padding."""
    return (spec.hf_config.get("pad_token_id") or 0) + 1


def _rows(x: Tensor) -> Tensor:
    """[num_tokens, 2 * size] → [2 * num_tokens, size]."""
    return x.reshape(_NUM_STREAMS * len(x), -1)


def _predicting(x: Tensor) -> Tensor:
    return x.chunk(_NUM_STREAMS, dim=1)[1].contiguous()


def _as_heads(q: Tensor) -> Tensor:
    """[num_tokens, 2, num_heads, head_dim] → [num_tokens, num_heads * 2, head_dim]: the two that share a KV head."""
    return q.transpose(1, 2).flatten(1, 2)


def _as_rows(out: Tensor) -> Tensor:
    """[num_tokens, num_heads * 2, head_dim] → [2 * num_tokens, num_heads * head_dim]."""
    return out.unflatten(1, (-1, _NUM_STREAMS)).transpose(1, 2).flatten(2).flatten(0, 1)


def _renamed(context: ModelContext, side: str) -> ModelContext:
    tables = ("prophetnet.word_embeddings", "prophetnet.encoder.word_embeddings", "prophetnet.decoder.word_embeddings")
    tokens = next((name for name in tables if context.find(f"{name}.weight") is not None), tables[0])
    ends = {
        "model.embed_tokens": tokens,
        "positions": f"{side}.position_embeddings",
        "embedding_norm": f"{side}.embeddings_layer_norm",
        "streams": f"{side}.ngram_embeddings",
    }
    return replace(context, weights=RearrangedWeights(context.weights, _PIECES, layer=f"{side}.layers.{{}}", ends=ends))
