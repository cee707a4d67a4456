"""Copies sequences' recurrent states to and from pages of the KV cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.executor.transfers import to_device


class StateSnapshots:
    """Copies states between slots and pages, as bytes.

    Args:
        states: by recurrent layer, tensors [max_num_seqs, ...].
        pages: the tensors of the KV cache, each [num_pages, bytes] of uint8. A page is a row of every one.
    """

    def __init__(self, states: Sequence[Sequence[Tensor]], pages: Sequence[Tensor]) -> None:
        self._parts = [tensor for layer in states for tensor in layer]
        self._pages = pages
        self._device = pages[0].device
        self._row_bytes = [tensor.shape[1] for tensor in pages]
        self._is_snapshot = np.zeros(len(pages[0]), bool)  # by page; True if a snapshot was written last

    def apply(self, plan: StepPlan) -> None:
        """Restores the states of requests that continue from a snapshot, then clears pages that will hold tokens.

        Attention may read places of a page before they are written, and multiply the values by 0. So these must not be
        infinities or NaN.
        """
        for request in plan.admitted:
            if request.snapshot:
                self._restore(request.slot, request.snapshot)
        for request in plan.admitted:
            self._clear(request.page_ids)
        for _, page_ids in plan.appended_pages:
            self._clear(page_ids)

    def take(self, plan: StepPlan) -> None:
        """Copies the states that the plan's step has computed to the pages that the plan names."""
        for slot, pages in plan.snapshots:
            content = torch.cat([_bytes(part[slot]) for part in self._parts])
            room = len(pages) * sum(self._row_bytes)
            content = torch.nn.functional.pad(content, (0, room - len(content)))
            index = self._index(pages)
            shares = content.split([len(pages) * size for size in self._row_bytes])
            for tensor, share in zip(self._pages, shares, strict=True):
                tensor[index] = share.view(len(pages), -1)
            self._is_snapshot[pages] = True

    def _restore(self, slot: int, pages: list[int]) -> None:
        index = self._index(pages)
        content = torch.cat([tensor[index].flatten() for tensor in self._pages])
        first = 0
        for part in self._parts:
            place = _bytes(part[slot])
            place.copy_(content[first : first + len(place)])
            first += len(place)

    def _clear(self, page_ids: Sequence[list[int]]) -> None:
        for pages in page_ids:
            former = [page for page in pages if self._is_snapshot[page]]
            if former:
                index = self._index(former)
                for tensor in self._pages:
                    tensor[index] = 0
                self._is_snapshot[former] = False

    def _index(self, pages: list[int]) -> Tensor:
        return to_device(np.array(pages), self._device)


def _bytes(tensor: Tensor) -> Tensor:
    """Views the memory of a dense tensor as [num_bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)
