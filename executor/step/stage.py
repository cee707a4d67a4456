"""A rank's pipeline stage: the messages that its steps receive and send."""

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor.models.base import Model, StagedModel
from quire.executor.parallel.stage_neighbours import StageNeighbours


class PipelineStage:
    """A rank's place in the pipeline. A step's tokens determine the sizes of messages, so ranks need not negotiate
    them.

    Args:
        neighbours: the ranks before and after; None: this rank has all layers.
        token_size: values of each token in a message, see `StagedModel.handover_size`.
        dtype: of these values.

    Attributes:
        is_last: its hidden states become logits.
    """

    def __init__(
        self,
        neighbours: StageNeighbours | None = None,
        *,
        is_first: bool = True,
        is_last: bool = True,
        token_size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._neighbours = neighbours
        self._is_first = is_first
        self._token_size = token_size
        self._dtype = dtype
        self._device = device
        self.is_last = is_last

    @classmethod
    def of(
        cls, config: EngineConfig, rank: Rank, model: Model, neighbours: StageNeighbours | None, device: torch.device
    ) -> "PipelineStage":
        """Builds the place of `rank`, which runs `model`."""
        if neighbours is None:
            return cls()
        assert isinstance(model, StagedModel)
        return cls(
            neighbours,
            is_first=rank.pipeline == 0,
            is_last=rank.pipeline == config.layout.pipeline - 1,
            token_size=model.handover_size(config.spec.hidden_size),
            dtype=getattr(torch, config.spec.dtype),
            device=device,
        )

    def receive(self, num_tokens: int) -> Tensor | None:
        """Receives the previous stage's message for a step's tokens, [num_tokens * token_size]; None in the first
        stage.

        Waits until that stage has finished the step.
        """
        if self._neighbours is None or self._is_first:
            return None
        return self._neighbours.receive(
            torch.empty(num_tokens * self._token_size, dtype=self._dtype, device=self._device)
        )

    def send(self, message: Tensor) -> None:
        """Sends the message for a step's tokens to the next stage."""
        assert self._neighbours is not None
        self._neighbours.send(message)
