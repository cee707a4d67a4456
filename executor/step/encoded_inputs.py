"""Encoder inputs of the requests in a worker's slots: their pages, and those that the next step encodes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.core.config.resolved import EngineConfig
from quire.core.wire.encoder_input import EncoderInput
from quire.core.wire.protocol import NewSlot
from quire.executor.transfers import to_device, to_device_together
from quire.ops.backend import AttentionBatch, Backend, DeviceRows


class EncoderBatch(NamedTuple):
    """Inputs that a step encodes; their rows follow one another.

    Attributes:
        content: on the device; [num_rows] int64 of token ids, or features [num_inputs, num_channels, num_frames]
            float32.
        positions: [num_rows] int64, on the device; place in the input.
        lengths: [num_inputs] int64, on the host.
        slot_mappings: per KV group of the kind "cross", [num_rows] int64 on the device; places of keys and values.
    """

    content: torch.Tensor
    positions: torch.Tensor
    lengths: np.ndarray
    slot_mappings: list[torch.Tensor]


class CrossRows(NamedTuple):
    """What the rows of a step attend to in the pages of one KV group of the kind "cross".

    Attributes:
        lengths: [num_rows] int64, on the host; rows of the encoder input.
        block_tables: [num_rows, most pages of a row] int32, on the host.
        there: the same on the device, if it is there already.
    """

    lengths: np.ndarray
    block_tables: np.ndarray
    there: DeviceRows | None = None

    def attention(
        self, ops: Backend, query_lens: np.ndarray, own: np.ndarray | slice, slots: torch.Tensor, block_size: int
    ) -> AttentionBatch:
        """Builds the attention of the last `query_lens` tokens of the rows that `own` selects: each sees all of its
        request's input.

        Args:
            slots: any that `Backend.attention_batch` takes: nothing is stored.
        """
        query_lens, lengths, tables = query_lens[own], self.lengths[own], self.block_tables[own]
        if len(query_lens) == query_lens.sum():  # the last token of a sequence sees all of it
            return ops.attention_batch(query_lens, lengths, tables, slots, block_size=block_size, there=self.there)
        # More tokens than the input has rows are several rows, each no longer than a sequence can be.
        counts = -(-query_lens // lengths)
        row = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        parts = np.minimum(query_lens[row] - number * lengths[row], lengths[row])
        spans = np.stack((np.zeros_like(lengths), lengths), axis=1)
        return ops.attention_batch(
            parts, lengths[row], tables[row], slots, block_size=block_size, prefix_spans=spans[row]
        )


class EncodedInputs:
    """Owns the lists of pages with encoder inputs.

    Args:
        max_rows: of an input.
        num_groups: KV groups of the kind "cross".
    """

    def __init__(
        self, max_num_seqs: int, max_rows: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self._block_size = block_size
        self._device = device
        self._lengths = np.ones(max_num_seqs, np.int64)
        max_pages = -(-max_rows // block_size)
        self._tables = [np.zeros((max_num_seqs, max_pages), np.int32) for _ in range(num_groups)]
        self._pending: dict[int, EncoderInput] = {}  # by slot

    @classmethod
    def of(cls, config: EngineConfig, num_groups: int, device: torch.device) -> "EncodedInputs | None":
        """Builds those of a worker's model; None if it has no encoder."""
        encoder, limits = config.spec.encoder, config.limits
        if encoder is None:
            return None
        return cls(limits.max_num_seqs, encoder.max_rows, limits.block_size, num_groups, device)

    @property
    def num_groups(self) -> int:
        return len(self._tables)

    def admit(self, request: NewSlot) -> None:
        """Adds the pages of a request that enters a slot, and its input if the next step encodes it."""
        self._pending.pop(request.slot, None)
        encoded = request.encoded
        assert encoded is not None, "the model has an encoder, and a request has no input for it"
        self._lengths[request.slot] = encoded.num_rows
        for table, pages in zip(self._tables, encoded.page_ids, strict=True):
            table[request.slot, : len(pages)] = pages
        if encoded.content is not None:
            self._pending[request.slot] = encoded.content

    def release(self, slots: list[int]) -> None:
        """Drops the requests in these slots."""
        for slot in slots if self._pending else ():
            self._pending.pop(slot, None)

    def rows(self, slots: np.ndarray) -> list[CrossRows]:
        """Returns, by group, what rows of the requests in `slots` attend to."""
        lengths = self._lengths[slots]
        num_pages = -(-int(lengths.max()) // self._block_size)
        return [CrossRows(lengths, table[slots, :num_pages]) for table in self._tables]

    def cache_slots(self, slot: int, group: int) -> np.ndarray:
        """Returns the places of a request's keys and values, [num_rows] int64 on the host, in one of the groups."""
        page, offset = np.divmod(np.arange(self._lengths[slot]), self._block_size)
        return self._tables[group][slot, page].astype(np.int64) * self._block_size + offset

    def fill(self, slots: Sequence[int], lengths: np.ndarray, tables: Sequence[np.ndarray]) -> None:
        """Writes `rows` into `lengths` [num_rows] and, by group, `tables` [num_rows, most pages of any input]."""
        lengths[:] = self._lengths[slots]
        for own, table in zip(self._tables, tables, strict=True):
            table[:] = own[slots]

    def take_batch(self) -> EncoderBatch | None:
        """Returns the inputs that the step encodes, and forgets them; None if there are none."""
        if not self._pending:
            return None
        pending, self._pending = self._pending, {}
        lengths = np.array([content.num_rows for content in pending.values()], np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = np.repeat(np.fromiter(pending, np.int64), lengths)
        page, offset = np.divmod(positions, self._block_size)
        mappings = [table[slots, page].astype(np.int64) * self._block_size + offset for table in self._tables]
        there, *mappings_there = to_device_together([positions, *mappings], self._device)
        read = to_device(_content(list(pending.values())), self._device)
        return EncoderBatch(read, there, lengths, mappings_there)


def _content(inputs: Sequence[EncoderInput]) -> np.ndarray:
    """Joins what the encoder reads of several inputs, all of one kind, as `EncoderBatch.content`."""
    features = [each.features for each in inputs if each.features is not None]
    if features:
        assert len(features) == len(inputs), "an encoder reads tokens or features, not both"
        return np.stack([np.frombuffer(each.values, "<f4").reshape(each.num_channels, -1) for each in features])
    return np.concatenate([np.array(each.token_ids, np.int64) for each in inputs])
