"""Whisper (arXiv:2212.04356): an encoder of log-mel spectrograms, and a decoder of BART's form."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.decoder import size_of
from quire.executor.models.encoder_decoders.bart import BartForConditionalGeneration, FlatBias, SideName
from quire.executor.models.encoders.encoder import Encoder, position_rows
from quire.executor.weights.readers import Shard

_WIDTH = 3
"""Frames that a convolution sees."""


class _WithoutKeyBias(FlatBias):
    """Reads zeros as biases of keys, which checkpoints lack: attention to keys is invariant to them."""

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if not name.endswith(".k_proj.bias") or self.find(name) is not None:
            return super().read(name, shape, shard, dtype)
        return torch.zeros_like(super().read(name.replace(".k_proj.", ".q_proj."), shape, shard, dtype))


class _Convolution:
    """A convolution over frames with one frame of zeros at each end: [num_inputs, num_frames, in_features] to
    [num_inputs, num_frames / stride, out_features]. Every rank has it whole.
    """

    def __init__(self, context: ModelContext, name: str, in_features: int, out_features: int, stride: int) -> None:
        self._weight = context.read(f"{name}.weight", (out_features, in_features, _WIDTH)).flatten(1)
        self._bias = context.read(f"{name}.bias", (out_features,))
        self._stride = stride

    def __call__(self, x: Tensor) -> Tensor:
        windows = functional.pad(x, (0, 0, 1, 1)).unfold(1, _WIDTH, self._stride).flatten(2)
        return functional.gelu(functional.linear(windows, self._weight, self._bias))


class _Frames:
    """Makes hidden states of spectrograms [num_inputs, num_channels, num_frames]: two convolutions, the second of which
    halves the number of frames, and rows of positions.

    """

    def __init__(self, spec: ModelSpec, context: ModelContext, stem: str, positions: Tensor) -> None:
        channels, size = size_of(spec, "num_mel_bins"), spec.hidden_size
        self._ops = context.ops
        self._dtype = context.dtype
        self._first = _Convolution(context, f"{stem}.conv1", channels, size, stride=1)
        self._second = _Convolution(context, f"{stem}.conv2", size, size, stride=2)
        self._positions = positions

    def __call__(self, features: Tensor, step: StepContext) -> Tensor:
        x = self._second(self._first(features.to(self._dtype).transpose(1, 2))).flatten(0, 1)
        return self._ops.add(self._ops.take_rows(self._positions, step.positions), x)


class WhisperForConditionalGeneration(BartForConditionalGeneration):
    """Norms before blocks and after all layers; learned positions of the decoder, stored sinusoids of the encoder."""

    SIZES = ("decoder_ffn_dim", "encoder_ffn_dim", "num_mel_bins", "max_source_positions", "max_target_positions")
    HEAD = "proj_out"
    norms_first = True
    norms_embedding = False
    heeds_scale = False
    weights_type = _WithoutKeyBias

    @property
    def aligners(self) -> Sequence[CrossAttention]:
        """The decoder's attention to the sound, layer by layer."""
        return [cross for cross in self._crosses if isinstance(cross, CrossAttention)]

    def position_rows(self, spec: ModelSpec, context: ModelContext, side: SideName) -> Tensor:
        return position_rows(context, "positions.weight", size_of(spec, "max_target_positions"), spec.hidden_size)

    def _encoder_of(self, spec: ModelSpec, context: ModelContext, embed: Embedding | None, scale: float) -> Encoder:
        encoder = super()._encoder_of(spec, context, embed, scale)
        # Of each row: twice a frame as the first product reads and writes it, and once as the second does.
        frames = 2 * (_WIDTH * size_of(spec, "num_mel_bins") + spec.hidden_size) + (_WIDTH + 1) * spec.hidden_size
        encoder.activation_size = max(encoder.activation_size, frames)
        return encoder

    def _encoder_embedding(
        self, spec: ModelSpec, context: ModelContext, embed: Embedding | None, scale: float
    ) -> Embedding:
        num_rows = size_of(spec, "max_source_positions")
        positions = position_rows(context, "positions.weight", num_rows, spec.hidden_size)
        return _Frames(spec, context, "model.encoder", positions)
