"""T5Gemma 2 (arXiv:2512.14856), its text model: layers of Gemma 3 on both sides. The softmax of the decoder's attention
is over its own tokens and the encoder's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.merged import EncoderKeys, MergedAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import attention_shape, layer_places, vocabulary_ends
from quire.executor.models.dense.gemma2 import gemma_factor
from quire.executor.models.dense.gemma3 import gemma_rope
from quire.executor.models.encoder_decoders.encoder_decoder import EncoderDecoder, cross_place, encoder_context
from quire.executor.models.encoder_decoders.t5gemma import Side, build_encoder, own_spec
from quire.executor.weights.readers import Shard
from quire.executor.weights.rearranged import RearrangedWeights
from quire.ops.backend import AttentionForm, Backend

_UNSEEN = -1e4
"""The bias of a key that is not seen: its weight is 0 beside that of the token itself, which each sees.

Kernels take parts of a row's keys that are all unseen, where a far greater number loses the differences of scores.
"""
_TOKENS = "model.embed_tokens"
_IMAGE_END = f"{_TOKENS}.eoi_embedding"


class _Side(Side):
    """A side whose queries and keys are normalized, and whose layers rotate by their type."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context)
        self.qk_norm = self.style
        if value := spec.hf_config.get("attn_logit_softcapping"):
            raise ModelLoadError(
                f"{spec.name}: attn_logit_softcapping {value!r} is not supported in {spec.architecture}."
            )

    def form_of_encoder(self, index: int) -> AttentionForm:
        """A window of an even number of tokens has one more behind a token than before it."""
        window = self.windows[index]
        if window is None:
            return self.form
        before, behind = (window - 1) // 2, window // 2
        form = self.form._replace(window=behind + 1)
        if before == behind:
            return form
        biases = torch.zeros(self.spec.num_attention_heads, 2 * behind + 1)
        biases[:, 0] = _UNSEEN
        return form._replace(distance_bias=biases)

    def _rotaries(self) -> list[RotaryEmbedding]:
        config, head_dim = self.spec.hf_config, self.spec.head_dim
        kinds = {kind: RotaryEmbedding(self.context, gemma_rope(config, kind), head_dim) for kind in set(self.types)}
        return [kinds[kind] for kind in self.types]


class _MergedLayer(ResidualLayer):
    """A layer of the decoder: its attention also is that to the encoder."""

    attention: MergedAttention

    @property
    def cross(self) -> EncoderKeys:
        return self.attention.cross


class _MarkedEmbedding:
    """Looks up tokens. The one that ends an image has a row of its own, beside the table that the head shares."""

    def __init__(self, ops: Backend, embed: Embedding, token_id: int, vocab_size: int, difference: Tensor) -> None:
        """Takes the token's own row less that in the table, [hidden]."""
        self._ops = ops
        self._embed = embed
        self._is_marked = torch.zeros(vocab_size, 1, dtype=torch.int64, device=difference.device)
        self._is_marked[token_id] = 1
        self._rows = torch.stack((torch.zeros_like(difference), difference))

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        marks = self._ops.take_rows(self._is_marked, token_ids).view(-1)
        return self._ops.add(self._ops.take_rows(self._rows, marks), self._embed(token_ids, step))


class T5Gemma2ForConditionalGeneration(EncoderDecoder):
    """One table of tokens for both sides and the head. Images are not read."""

    SIZES = ("intermediate_size",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        side = _Side(spec, _renamed(context, "model.decoder"))
        scale = gemma_factor(spec, context)
        embed, head = vocabulary_ends(
            spec, side.context, is_tied=config.get("tie_word_embeddings", True), scale=scale,
            softcap=config.get("final_logit_softcapping"),
        )  # fmt: skip
        embed = _marked(spec, side.context, embed, scale)
        own = own_spec(spec, config["encoder"])
        encoder = build_encoder(_Side(own, _renamed(encoder_context(spec, context), _encoder_name(context))), embed)
        layers = [_decoder_layer(side, place) for place in layer_places(spec, context)]
        super().__init__(encoder, embed, layers, side.norm("model.norm"), head)


def _decoder_layer(side: _Side, place: LayerPlace) -> _MergedLayer:
    name = place.name
    attention = MergedAttention(
        side.context, place, cross_place(place, side.spec), attention_shape(side.spec), side.rotaries[place.index],
        qkv_bias=side.bias, output_bias=side.bias, qk_norm=side.qk_norm, form=side.form_of_decoder(place.index),
    )  # fmt: skip
    (before, after), (before_mlp, after_mlp) = side.norms(name, "self_attn", "feedforward")
    return _MergedLayer(
        side.context.ops, attention, side.mlp(name), before_attention=before, after_attention=after,
        before_mlp=before_mlp, after_mlp=after_mlp,
    )  # fmt: skip


def _marked(spec: ModelSpec, context: ModelContext, embed: Embedding, scale: float) -> Embedding:
    """Adds to `embed` the row of the token that ends an image, if the vocabulary has it."""
    token_id, size = spec.hf_config["encoder"].get("eoi_token_index", 256_000), spec.hidden_size
    if token_id >= spec.vocab_size or context.find(_IMAGE_END) is None:
        return embed
    row = Shard(0, token_id, token_id + 1)
    table = context.read(f"{_TOKENS}.weight", (spec.vocab_size, size), row).to(torch.float32, copy=True)[0]
    own = context.read(_IMAGE_END, (size,)).to(torch.float32, copy=True)
    difference = own.sub_(table.mul_(scale)).to(context.dtype)
    return _MarkedEmbedding(context.ops, embed, token_id, spec.vocab_size, difference)


def _renamed(context: ModelContext, side: str) -> ModelContext:
    tokens = _stored(context, [f"{_encoder_name(context)}.embed_tokens", "model.decoder.embed_tokens"], ".weight")
    ends = {_TOKENS: tokens, "model.norm": f"{side}.norm", "lm_head": "lm_head.out_proj"}
    return replace(context, weights=RearrangedWeights(context.weights, {}, layer=f"{side}.layers.{{}}", ends=ends))


def _encoder_name(context: ModelContext) -> str:
    """Returns the stored name of the text model's encoder, which lies beside that of images in some checkpoints."""
    return _stored(context, ["model.encoder", "model.encoder.text_model"], ".norm.weight")


def _stored(context: ModelContext, names: list[str], end: str) -> str:
    """Returns the first of `names` that the checkpoint has a tensor of, or else the first."""
    return next((name for name in names if context.find(f"{name}{end}") is not None), names[0])
