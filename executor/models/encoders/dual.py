"""CLIP (arXiv:2103.00020), SigLIP (2303.15343) and SigLIP 2 (2502.14786): vectors of texts and of images in one space.

Two encoders of one form, with norms before blocks; they differ in ends.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.media import MediaItem
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import VocabularyWeight
from quire.executor.models.base import MediaRows, MediaSupport
from quire.executor.models.decoder import activation_of, size_of
from quire.executor.models.encoders.encoder import (
    Encoder,
    EncoderEmbedding,
    PreNormLayer,
    encoder_shape,
    position_rows,
    projection,
)
from quire.executor.models.encoders.heads import Heads
from quire.executor.models.encoders.image import read_patches
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm

_PIECES = {
    "self_attn.o_proj": Piece("self_attn.out_proj"),
    "attention_norm": Piece("layer_norm1"),
    "mlp.up_proj": Piece("mlp.fc1"),
    "mlp.down_proj": Piece("mlp.fc2"),
    "mlp_norm": Piece("layer_norm2"),
}
_POOL = "vision_model.head"
_ENDS = {f"{_POOL}.mlp.up_proj": f"{_POOL}.mlp.fc1", f"{_POOL}.mlp.down_proj": f"{_POOL}.mlp.fc2"}
_UNSEEN = -1e9
"""Added to the scores of keys after the query: their weights become 0."""


class CLIPModel:
    """CLIP. A text's vector is that of its end token, which sees all tokens before it; an image's follows from a token
    before its patches. Implements `quire.executor.models.base.Model` and `ReadsMedia`.

    Subclasses differ in the attributes.

    Attributes:
        SIZES: fields that the text's part of config.json must have.
        VISION: fields of `vision_config` that config.json may leave out.
        eps: of norms, where config.json has none.
        is_causal: tokens of a text see those before them.
    """

    SIZES: Sequence[str] = ("intermediate_size", "max_position_embeddings")
    VISION: ClassVar[Mapping[str, Any]] = {"patch_size": 32, "hidden_act": "quick_gelu"}
    eps = 1e-5
    is_causal = True

    kv_layers: Sequence[AttentionKV] = ()
    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        self._ops, self._context, self._size = context.ops, context, spec.hidden_size
        text = _side(spec, spec.hf_config)
        of_text = _renamed(context, "text_model")
        self._texts = self._text_encoder(text, of_text)
        self._project_text = self.text_projection(text, of_text)
        self._end_id = spec.hf_config.get("eos_token_id", 49407)
        self.activation_size = self._texts.activation_size
        self.media: MediaSupport | None = None
        if not context.reads_media:
            return
        self.media = MediaSupport(["image"])
        vision = _side(spec, {**_VISION, **self.VISION, **spec.config_json["vision_config"]})
        of_images = replace(_renamed(context, "vision_model"), adapters=None)
        self._patches = read_patches(vision, of_images, **self.patch_form())
        self._layers = self._encoder_layers(vision, of_images)
        self._finish = self.image_head(vision, of_images)
        self.activation_size = max(self.activation_size, self._layers[0].activation_size)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Computes the vector of each token's text, or of the image in its place: [num_tokens, size].

        Tokens before the end of a text have the vector that it would have if it ended there.
        """
        images = step.input_embeds
        if images is not None and len(images.places) == len(token_ids):
            return torch.empty_like(images.rows).index_copy_(0, images.places, images.rows)
        if images is not None:  # whose rows are vectors, not embeddings
            step = StepContext(step.positions, [], [], sequences=step.sequences)
        hidden = self._texts.forward(token_ids, step)
        ends = self.ends(token_ids, step.positions)
        vectors = self._project_text(hidden if ends is None else self._ops.take_rows(hidden, ends))
        return vectors if images is None else vectors.index_copy(0, images.places, images.rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Asserts: nothing samples."""
        raise AssertionError("an encoder samples no tokens")

    def encode_media(self, items: Sequence[MediaItem]) -> list[MediaRows]:
        """Computes the vectors of images, each [1, size]."""
        return [MediaRows(self._vector(item)) for item in items]

    def _vector(self, item: MediaItem) -> Tensor:
        x = self._patches(item.arrays | item.facts)
        lengths = np.array([len(x)], np.int64)
        device = self._context.device
        positions = torch.arange(len(x), device=device)
        step = StepContext(positions, [], [], sequences=self._ops.sequence_batch(lengths, device))
        for layer in self._layers:
            x = layer(x, step)
        return self._finish(x)

    def media_positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        """Returns None: an image's vector has no place in a text."""
        return None

    def ends(self, token_ids: Tensor, positions: Tensor) -> Tensor | None:
        """Returns the token whose vector each token has, [num_tokens] int64; None: its own.

        A text ends at its first end token, whatever follows, such as padding. Where config.json says 2, as in
        checkpoints of OpenAI, the end has the greatest id of a text.
        """
        end_id = self._end_id
        if not isinstance(end_id, int):
            return None
        places = torch.arange(len(token_ids), device=token_ids.device)
        texts = (positions == 0).cumsum(0) - 1
        if end_id == 2:
            greatest = torch.zeros_like(token_ids).scatter_reduce(0, texts, token_ids, "amax")
            is_end = token_ids == greatest[texts]
        else:
            is_end = token_ids == end_id
        found = torch.where(is_end, places, len(places))
        first = torch.full_like(places, len(places)).scatter_reduce(0, texts, found, "amin")[texts]
        return torch.minimum(first, places)

    def text_projection(self, side: ModelSpec, context: ModelContext) -> ColumnLinear:
        """Builds what makes a vector of a text's hidden state."""
        return projection(context, "text_projection", side.hidden_size, self._size, bias=False)

    def patch_form(self) -> dict[str, Any]:
        """Returns the arguments of `read_patches`."""
        return {"has_bias": False, "has_class": True}

    def image_head(self, side: ModelSpec, context: ModelContext) -> "_ClassHead | _AttentionHead":
        """Builds what makes a vector of an image's hidden states."""
        return _ClassHead(side, context, self.eps, self._size)

    def _text_encoder(self, side: ModelSpec, context: ModelContext) -> Encoder:
        stem, size = "text_model.embeddings", side.hidden_size
        words = VocabularyWeight(context, f"{stem}.token_embedding.weight", side.vocab_size, size)
        num_rows = size_of(side, "max_position_embeddings")
        positions = position_rows(context, f"{stem}.position_embedding.weight", num_rows, size)
        style = _style(side, self.eps)
        return Encoder(
            EncoderEmbedding(context, words, positions=positions),
            self._encoder_layers(side, context, is_causal=self.is_causal),
            Heads(),
            style.layer(context, "text_model.final_layer_norm", size),
        )

    def _encoder_layers(self, side: ModelSpec, context: ModelContext, *, is_causal: bool = False) -> list[PreNormLayer]:
        style, size = _style(side, self.eps), side.hidden_size
        form = AttentionForm(side.head_dim**-0.5)
        if is_causal:  # by the distance of the key: before the query, at it, and after it
            form = form._replace(distance_bias=torch.tensor([[0.0, 0.0, _UNSEEN]]).repeat(side.num_attention_heads, 1))
        activation, inner = activation_of(side, "hidden_act"), size_of(side, "intermediate_size")
        return [
            PreNormLayer(
                context.ops,
                style.layer(context, f"{name}.attention_norm", size),
                SequenceAttention(context, f"{name}.self_attn", encoder_shape(side), form=form),
                style.layer(context, f"{name}.mlp_norm", size),
                MLP(context, f"{name}.mlp", size, inner, activation),
            )
            for name in (f"model.layers.{index}" for index in range(side.num_layers))
        ]


class SiglipModel(CLIPModel):
    """SigLIP: tokens of a text see each other and its padding, whose last token has the vector; the vector of an image
    is attention of a learned query to its patches."""

    VISION: ClassVar[Mapping[str, Any]] = {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh"}
    eps = 1e-6
    is_causal = False

    def ends(self, token_ids: Tensor, positions: Tensor) -> Tensor | None:
        return None

    def text_projection(self, side: ModelSpec, context: ModelContext) -> ColumnLinear:
        return projection(context, "text_model.head", side.hidden_size, self._size, bias=True)

    def patch_form(self) -> dict[str, Any]:
        return {}

    def image_head(self, side: ModelSpec, context: ModelContext) -> "_ClassHead | _AttentionHead":
        if not side.hf_config.get("vision_use_head", True):
            raise ModelLoadError(f"{side.name}: its images have no vector (vision_use_head is false in config.json).")
        return _AttentionHead(side, context, self.eps)


class Siglip2Model(SiglipModel):
    """SigLIP 2 with images of any shape (NaFlex): patches come cut, and the table of positions is stretched to them."""

    def patch_form(self) -> dict[str, Any]:
        return {"are_cut": True}


_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "num_channels": 3,
}
"""Defaults of `vision_config` in all classes."""


class _ClassHead:
    """The vector of an image by the token before its patches: [num_tokens, hidden] → [1, size]."""

    def __init__(self, side: ModelSpec, context: ModelContext, eps: float, size: int) -> None:
        self._norm = _style(side, eps).layer(context, "vision_model.post_layernorm", side.hidden_size)
        self._project = projection(context, "visual_projection", side.hidden_size, size, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self._project(self._norm(x[:1].contiguous()))


class _AttentionHead:
    """The vector of an image by attention of a learned query to its patches: [num_patches, hidden] → [1, hidden]."""

    def __init__(self, side: ModelSpec, context: ModelContext, eps: float) -> None:
        size, style = side.hidden_size, _style(side, eps)
        name = f"{_POOL}.attention"
        self._ops = context.ops
        self._head_dim = side.head_dim
        self._probe = context.read(f"{_POOL}.probe", (1, 1, size))[0]
        self._query, self._keys_and_values = (
            context.packing.linear(functools.partial(_read_rows, context, name, size, rows))
            for rows in (slice(size), slice(size, 3 * size))
        )
        self._norm = style.layer(context, "vision_model.post_layernorm", size)
        self._output = projection(context, f"{name}.out_proj", size, size, bias=True)
        self._mlp_norm = style.layer(context, f"{_POOL}.layernorm", size)
        inner = size_of(side, "intermediate_size")
        self._mlp = MLP(context, f"{_POOL}.mlp", size, inner, activation_of(side, "hidden_act"))

    def __call__(self, x: Tensor) -> Tensor:
        both = self._ops.linear(self._norm(x), self._keys_and_values)
        keys, values = both.view(len(x), 2, -1, self._head_dim).permute(1, 2, 0, 3)
        query = self._ops.linear(self._probe, self._query).view(-1, 1, self._head_dim)
        pooled = F.scaled_dot_product_attention(query, keys, values).view(1, -1)
        out = self._output(pooled)
        return self._ops.add(self._mlp(self._mlp_norm(out)), out)


def _read_rows(context: ModelContext, name: str, size: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Reads some rows of the projections of queries, keys and values, which are stored as one, with their biases."""
    weight = context.read(f"{name}.in_proj_weight", (3 * size, size))
    return weight[rows].contiguous(), context.read(f"{name}.in_proj_bias", (3 * size,))[rows].contiguous()


def _side(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Returns the facts of one encoder, whose part of config.json is `config`."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if size % heads:
        raise ModelLoadError(f"config.json of {spec.name}: hidden_size {size} is no multiple of {heads} heads.")
    return structs.replace(
        spec,
        hf_config=dict(config),
        hidden_size=size,
        num_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
    )


def _style(side: ModelSpec, eps: float) -> NormStyle:
    return NormStyle(side.hf_config.get("layer_norm_eps", eps), is_centred=True, has_bias=True)


def _renamed(context: ModelContext, stem: str) -> ModelContext:
    """Returns a context that finds the layers of one encoder under their names in the checkpoint."""
    weights = RearrangedWeights(context.weights, _PIECES, layer=f"{stem}.encoder.layers.{{}}", ends=_ENDS)
    return replace(context, weights=weights)
