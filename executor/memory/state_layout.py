"""The memory of recurrent layers' states on one rank, and the number of pages of a snapshot."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.core.config.cache import CacheConfig
from quire.core.config.resolved import SchedulerLimits
from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import LayerCache
from quire.executor.memory.kv_layout import zeros

SHORTEST_INTERVAL = 512
LONGEST_INTERVAL = 2048
"""The least tokens between two snapshots, without an option. A snapshot ends a chunk of a prompt, and takes memory."""


class StateLayout:
    """The states of all slots, in separate tensors.

    Attributes:
        state_bytes: of one sequence, in all layers.
    """

    def __init__(self, layers: Sequence[LayerState], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self.state_bytes = sum(layer.num_bytes for layer in layers)

    def groups(
        self, paged: Sequence[KVGroupSpec], page_bytes: int, cache: CacheConfig, limits: SchedulerLimits
    ) -> list[KVGroupSpec]:
        """Returns the recurrent group of a model, next to its `paged` groups, or none without recurrent layers.

        Raises:
            ModelLoadError: the model has no such layers, but an option sets the interval of snapshots.
        """
        if not self._layers:
            if cache.mamba_block_size is not None:
                raise ModelLoadError(
                    "--mamba-block-size says how often the state of recurrent layers is kept, and this model has no "
                    "such layers: drop the option."
                )
            return []
        interval = None
        # A state with first rows is computed from all of a prompt at once.
        if limits.enable_prefix_caching and not any(layer.num_first_rows for layer in self._layers):
            interval = cache.mamba_block_size or self._interval(paged, page_bytes, limits.block_size)
        layers = list(range(len(self._layers)))
        return [KVGroupSpec("recurrent", layers, page_bytes, state_bytes=self.state_bytes, interval=interval)]

    def allocate(self, max_num_seqs: int) -> list[tuple[Tensor, ...]]:
        """Allocates each recurrent layer's tensors of zeros, each [max_num_seqs, *shape]."""

        def tensors(layer: LayerState) -> Iterator[Tensor]:
            for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True):
                num_bytes = max_num_seqs * math.prod(shape) * dtype.itemsize
                yield zeros(num_bytes, self._device).view(dtype).view(max_num_seqs, *shape)

        return [tuple(tensors(layer)) for layer in self._layers]

    def _interval(self, paged: Sequence[KVGroupSpec], page_bytes: int, block_size: int) -> int:
        """Chooses the tokens between snapshots, so that one takes no more memory than their keys and values."""
        num_pages = -(-self.state_bytes // page_bytes)
        num_blocks = -(-SHORTEST_INTERVAL // block_size)
        while num_pages > num_blocks * len(paged) and 2 * num_blocks * block_size <= LONGEST_INTERVAL:
            num_blocks *= 2
        return num_blocks * block_size


class StatePages:
    """The pages of a rank without keys and values, in place of a `KVLayout`. They hold only snapshots.

    Attributes:
        groups: none with block tables.
        page_bytes: of a page.
    """

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        self.groups: list[KVGroupSpec] = []
        self.page_bytes = page_bytes
        self._device = device

    def allocate(self, num_pages: int) -> tuple[list[Tensor], list[LayerCache]]:
        return [zeros(num_pages * self.page_bytes, self._device).view(num_pages, self.page_bytes)], []

    def __str__(self) -> str:
        return "no keys and values"


def describe_states(groups: Sequence[KVGroupSpec]) -> list[str]:
    """Describes the recurrent group of a model for the log, if there is one."""
    texts = []
    for group in groups:
        if group.is_recurrent:
            texts.append(f"recurrent state in layers: {len(group.layers)}; {group.state_bytes} bytes a sequence")
            texts.append(
                f"a snapshot of {group.snapshot_pages * group.page_bytes} bytes every {group.interval} tokens"
                if group.interval
                else "no snapshots"
            )
    return texts
