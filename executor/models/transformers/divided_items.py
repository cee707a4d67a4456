"""Divides the items of a step among ranks that have towers whole, and gives all ranks the rows."""

from collections.abc import Callable, Sequence

import torch

from quire.core.wire.media import MediaItem
from quire.executor.models.base import MediaRows
from quire.executor.parallel.groups import ParallelGroup


class DividedItems:
    """Runs each item on one rank of a group. All ranks call it with the same items."""

    def __init__(self, group: ParallelGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._dtype = dtype
        self._device = device

    def encode(self, items: Sequence[MediaItem], encode: Callable[[MediaItem], MediaRows]) -> list[MediaRows]:
        """Returns the rows of all items; `encode` makes those of one, and raises nothing."""
        owners = self._owners(items)
        own = {place: encode(item) for place, item in enumerate(items) if owners[place] == self._group.rank}
        forms = torch.zeros(len(items), 3)  # columns of a row, layers with features, and the token of layers from 1
        for place, made in own.items():
            deep = 0 if made.deep is None else len(made.deep)
            token = 0 if made.layer_token is None else made.layer_token + 1
            forms[place] = torch.tensor([made.rows.shape[1], deep, token])
        forms = self._group.all_reduce(forms.to(self._device)).cpu().to(torch.int64)
        parts = [
            _joined(own[place]).to(self._dtype).contiguous()
            if place in own
            else torch.empty(1 + deep, item.num_rows, width, dtype=self._dtype, device=self._device)
            for place, (item, (width, deep, _)) in enumerate(zip(items, forms.tolist(), strict=True))
        ]
        peers = [peer for peer in range(self._group.size) if peer != self._group.rank]
        self._group.exchange(
            [(peer, parts[place]) for place in own for peer in peers],
            [(owner, parts[place]) for place, owner in enumerate(owners) if place not in own],
        )
        return [
            MediaRows(part[0], part[1:] if len(part) > 1 else None, token - 1 if token else None)
            for part, (_, _, token) in zip(parts, forms.tolist(), strict=True)
        ]

    def _owners(self, items: Sequence[MediaItem]) -> list[int]:
        """Returns the rank of each item: from the largest on, the one with the fewest rows so far."""
        owners, loads = [0] * len(items), [0] * self._group.size
        for place in sorted(range(len(items)), key=lambda each: -items[each].num_rows):
            owners[place] = loads.index(min(loads))
            loads[owners[place]] += items[place].num_rows
        return owners


def _joined(made: MediaRows) -> torch.Tensor:
    rows = made.rows.unsqueeze(0)
    return rows if made.deep is None else torch.cat((rows, made.deep.to(rows.dtype)))
