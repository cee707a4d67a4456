"""The encoder of a class whose decoder, of a file here, attends to an image."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.core.config.resolved import EncoderSpec, ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.absent_modules import leave_out
from quire.executor.models.transformers.checkpoint import ModuleWeights, fill
from quire.executor.models.transformers.probe import set_attention
from quire.executor.models.transformers.skeleton import build_skeleton, first_tensor


def build_image_encoder(spec: ModelSpec, context: ModelContext) -> "ImageEncoder":
    """Builds the encoder of `spec` with its weights loaded.

    Raises:
        ModelLoadError: Transformers cannot build it, or it makes another number of rows than the facts say.
    """
    model = build_skeleton(spec, context.dtype, context.max_model_len)
    weights = ModuleWeights(context.weights, model, ())
    leave_out(model, model.get_decoder())
    fill(model, weights, context.device)
    assert spec.encoder is not None
    built = ImageEncoder(model, spec.encoder, context)
    if context.device.type != "meta":
        built.check(spec.name)
    return built


class ImageEncoder:
    """An encoder of images in the library's code, whole on each rank.

    Attributes:
        activation_size: values that it computes for a row: a guess, because its code is any.
    """

    def __init__(self, model: PreTrainedModel, facts: EncoderSpec, context: ModelContext) -> None:
        encoder = model.get_encoder()
        if isinstance(encoder, PreTrainedModel):
            set_attention(encoder, "sdpa" if encoder._supports_sdpa else "eager")
        self._encoder: nn.Module = encoder
        self._project: nn.Module = getattr(model, "enc_to_dec_proj", None) or nn.Identity()
        self._facts = facts
        self._dtype, self._device = context.dtype, context.device
        size = getattr(encoder.config, "hidden_size", 0)
        self.activation_size = 8 * size + facts.max_rows

    def forward(self, content: Tensor, step: StepContext) -> Tensor:
        """Encodes images [num_images, num_channels, num_pixels] float32, one at a time: [num_rows, hidden]."""
        images = content.view(len(content), self._facts.num_channels, *self._facts.image_size).to(self._dtype)
        return self._project(torch.cat([self._encode(image.unsqueeze(0)) for image in images])).contiguous()

    def _encode(self, image: Tensor) -> Tensor:
        return first_tensor(self._encoder(pixel_values=image))[0]

    def check(self, name: str) -> None:
        """Encodes one image. Raises ModelLoadError if the number of rows is another than the facts say."""
        facts = self._facts
        trial = torch.zeros(1, facts.num_channels, facts.image_size[0] * facts.image_size[1], device=self._device)
        with torch.inference_mode():
            num_rows = len(self._encode(trial.view(1, -1, *facts.image_size).to(self._dtype)))
        if num_rows != facts.max_rows:
            raise ModelLoadError(
                f"{name}: its encoder makes {num_rows} rows of an image, and {facts.max_rows} were expected."
            )
