"""A decoder of a file here that reads images: its class of Transformers has the towers."""

from collections.abc import Sequence

from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire.media import MediaItem
from quire.executor.layers.step_context import StepContext
from quire.executor.models.base import MediaRows, MediaTowers, Model, StagedModel


class ReadingDecoder:
    """Implements `quire.executor.models.base.StagedModel` and `ReadsMedia`."""

    def __init__(self, decoder: Model, towers: MediaTowers) -> None:
        self._decoder = decoder
        self._towers = towers
        self.kv_layers = decoder.kv_layers
        self.state_layers = decoder.state_layers
        self.activation_size = decoder.activation_size
        self.num_layer_outputs = decoder.num_layer_outputs
        self.media = towers.support

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        return self._decoder.forward(token_ids, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.compute_logits(hidden)

    def handover_size(self, hidden_size: int) -> int:
        """Counts as the decoder does."""
        assert isinstance(self._decoder, StagedModel)
        return self._decoder.handover_size(hidden_size)

    def encode_media(self, items: Sequence[MediaItem]) -> list[MediaRows]:
        made = self._towers.encode(items)
        if any(each.deep is not None for each in made):
            raise ModelLoadError("its tower makes features for the layers of the decoder, whose file here has none.")
        return made

    def media_positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        return self._towers.positions(token_ids, items)
