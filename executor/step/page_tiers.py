"""Tiers of memory on one rank, whose pages moves copy. See `quire.core.wire.page_moves`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.page_moves import Tier
from quire.executor.transfers import HostValues, Transfer, to_device


class PageTier(Protocol):
    """The pages of one tier."""

    def read(self, pages: list[int]) -> Transfer:
        """Starts to read `pages`, which nobody writes before the transfer is done.

        The transfer has one tensor, the bytes of the pages one after another: [num_bytes] uint8.
        """
        ...

    def write(self, pages: list[int], content: Tensor) -> None:
        """Replaces `pages`. A page past the end of `content` [num_bytes] uint8 gets zeros.

        Later reads return these bytes. The call may return before they have arrived.
        """
        ...

    def holds_states(self, pages: list[int]) -> np.ndarray:
        """Returns [num_pages] bool: True for pages that hold bytes of recurrent states instead of keys and values."""
        ...

    def mark(self, pages: list[int], holds_states: np.ndarray | bool) -> None:
        """Notes what `pages` hold now, as `holds_states` returns it."""
        ...


class CachePages:
    """Pages in tensors that the rank's device or its host can index: of the KV cache, or of a copy on the host.

    Args:
        tensors: each [num_pages, bytes] of uint8. A page is a row of every one.

    Attributes:
        has_held_states: some page has ever held bytes of states.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._device = tensors[0].device
        self._row_bytes = [tensor.shape[1] for tensor in tensors]
        self._holds_states = np.zeros(len(tensors[0]), bool)
        self.has_held_states = False

    def read(self, pages: list[int]) -> Transfer:
        index = self._index(pages)
        return HostValues([torch.cat([tensor[index].flatten() for tensor in self._tensors])])

    def write(self, pages: list[int], content: Tensor) -> None:
        room = len(pages) * sum(self._row_bytes)
        content = torch.nn.functional.pad(content.to(self._device), (0, room - len(content)))
        index = self._index(pages)
        shares = content.split([len(pages) * size for size in self._row_bytes])
        for tensor, share in zip(self._tensors, shares, strict=True):
            tensor[index] = share.view(len(pages), -1)

    def holds_states(self, pages: list[int]) -> np.ndarray:
        return self._holds_states[pages]

    def mark(self, pages: list[int], holds_states: np.ndarray | bool) -> None:
        self._holds_states[pages] = holds_states
        self.has_held_states = self.has_held_states or bool(np.any(holds_states))

    def clear_states(self, page_ids: Sequence[list[int]]) -> None:
        """Clears those of `page_ids`, by KV group, that hold bytes of states, because they will hold keys and values.

        Attention may read places of a page before they are written, and multiply the values by 0. So these must not be
        infinities or NaN.
        """
        former = [page for pages in page_ids for page in pages if self._holds_states[page]]
        if former:
            index = self._index(former)
            for tensor in self._tensors:
                tensor[index] = 0
            self._holds_states[former] = False

    def _index(self, pages: list[int]) -> Tensor:
        return to_device(np.array(pages), self._device)


class SlotStates:
    """The recurrent states of the slots. Slot s is page s.

    Args:
        states: by recurrent layer, dense tensors [max_num_seqs, ...].
    """

    def __init__(self, states: Sequence[Sequence[Tensor]]) -> None:
        self._parts = [tensor for layer in states for tensor in layer]

    def read(self, pages: list[int]) -> Transfer:
        return HostValues([torch.cat([_bytes(part[slot]) for slot in pages for part in self._parts])])

    def write(self, pages: list[int], content: Tensor) -> None:
        first = 0
        for place in (_bytes(part[slot]) for slot in pages for part in self._parts):
            place.copy_(content[first : first + len(place)])
            first += len(place)

    def holds_states(self, pages: list[int]) -> np.ndarray:
        return np.ones(len(pages), bool)

    def mark(self, pages: list[int], holds_states: np.ndarray | bool) -> None:
        """Does nothing: a slot always holds states."""


def lower_tiers(cache: Sequence[Tensor], num_host_pages: int) -> dict[Tier, PageTier]:
    """Allocates the tiers below the device, if they have pages. `cache` are the tensors of the KV cache."""
    if not num_host_pages:
        return {}
    return {"host": CachePages([torch.zeros(num_host_pages, each.shape[1], dtype=torch.uint8) for each in cache])}


def _bytes(tensor: Tensor) -> Tensor:
    """Views the memory of a dense tensor as [num_bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)
