"""A decoder that attends to an encoder of images (arXiv:2109.10282 TrOCR, 2111.15664 Donut, 2308.13418 Nougat).

The encoder is the library's class, the decoder one of BART's forms.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

from msgspec import structs
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.decoder import SettingError
from quire.executor.models.encoder_decoders.bart import BartForConditionalGeneration, SideName
from quire.executor.models.encoder_decoders.positions import spread_sinusoids
from quire.executor.models.encoders.encoder import Encoder


class _Form(NamedTuple):
    """What config.json does not say of a decoder.

    Attributes:
        head: the name of the head.
        norms_first: norms are before blocks.
    """

    head: str
    norms_first: bool = False


_FORMS = {"bart": _Form("lm_head"), "mbart": _Form("lm_head", norms_first=True), "trocr": _Form("output_projection")}
"""The decoders that are known, by their model type."""


class VisionEncoderDecoderModel(BartForConditionalGeneration):
    """The decoder of BART, mBART or TrOCR, and any encoder of Transformers that makes rows of pixels."""

    SIZES = ("decoder_ffn_dim",)
    BASE = "decoder.model"

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        own: dict[str, Any] = spec.config_json["decoder"]
        form = _FORMS.get(str(own.get("model_type")))
        if form is None:
            raise SettingError(
                f"{spec.name}: the decoder is of type {own.get('model_type')!r}; decoders that attend to images are "
                f"served of the types {', '.join(_FORMS)}."
            )
        config = {**spec.hf_config, "tie_word_embeddings": own.get("tie_word_embeddings", True)}
        self.HEAD, self.norms_first = f"decoder.{form.head}", form.norms_first
        self.norms_embedding = config.get("layernorm_embedding", True)
        self.encoder_size = config.get("cross_attention_hidden_size")
        self._has_sinusoids = not config.get("use_learned_position_embeddings", True)
        self._stored = context  # under the checkpoint's names
        super().__init__(structs.replace(spec, hf_config=config), context)

    def position_rows(self, spec: ModelSpec, context: ModelContext, side: SideName) -> Tensor:
        if not self._has_sinusoids:
            return super().position_rows(spec, context, side)
        first = spec.hf_config.get("pad_token_id", 1) + 1
        rows = spread_sinusoids(context.max_model_len + first, spec.hidden_size)[first:].clone()
        return rows.to(context.device, context.dtype)

    def _encoder_of(self, spec: ModelSpec, context: ModelContext, embed: Embedding | None, scale: float) -> Encoder:
        # Imported here because it takes a second, and few models need it.
        from quire.executor.models.transformers import build_image_encoder

        return cast("Encoder", build_image_encoder(spec, replace(context, weights=self._stored.weights)))
