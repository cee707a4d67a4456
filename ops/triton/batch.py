"""The rows of a step for attention: those on the device for kernels, those on the host for plain torch."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.backend import DeviceRows
from quire.ops.eager.attention_plan import AttentionPlan
from quire.ops.triton.graphs import UnrecordableError
from quire.ops.triton.rows import PagedRows
from quire.ops.triton.specialization import ALIGNMENT


class _HostArray:
    """An array of a `TritonBatch` that only an operation outside recordings may read."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: "TritonBatch", _: type) -> Any:
        if batch.is_recorded():
            raise UnrecordableError(f"a layer reads {self._name} on the host")
        return batch.__dict__[self._name]

    def __set__(self, batch: "TritonBatch", array: Any) -> None:
        batch.__dict__[self._name] = array


class TritonBatch(AttentionPlan):
    """One step's rows. Kernels take `rows`; operations in plain torch take the plan."""

    query_lens = _HostArray()
    seq_lens = _HostArray()
    block_tables = _HostArray()

    def __init__(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        slot_mapping: Tensor,
        block_size: int,
        prefix_spans: np.ndarray | None,
        there: DeviceRows | None,
        is_recorded: Callable[[], bool],
    ) -> None:
        """Takes the arguments of `Backend.attention_batch`; `is_recorded` returns True while a step is recorded."""
        self.is_recorded = is_recorded
        self._there = there
        super().__init__(query_lens, seq_lens, block_tables, slot_mapping, block_size, prefix_spans)

    @cached_property
    def rows(self) -> PagedRows:
        """The rows on the device, copied there if they are not yet."""
        there, prefix_spans = self._there, None
        if there is None or self.prefix_spans is not None:
            there, prefix_spans = self._copy_rows()
        return PagedRows(
            there.query_starts,
            there.seq_lens,
            there.block_tables,
            self.slot_mapping,
            prefix_spans,
            self.block_size,
            there.max_query_len,
            there.max_seq_len,
            there.are_apart,
        )

    @property
    def positions(self) -> np.ndarray | None:
        return super().positions if self._there is None else None

    @property
    def max_seq_len(self) -> int:
        return self.rows.max_seq_len

    @property
    def tables_there(self) -> Tensor:
        return self.rows.block_tables

    def _copy_rows(self) -> tuple[DeviceRows, Tensor | None]:
        """Copies the rows to the device at once, and the prefix spans if there are any."""
        query_lens, seq_lens, tables = self.query_lens, self.seq_lens, self.block_tables
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        spans = np.empty(0, np.int64) if self.prefix_spans is None else self.prefix_spans.ravel()
        parts = [starts, seq_lens, spans, tables.ravel()]
        # Each part begins where a kernel's pointer must.
        packed = torch.from_numpy(np.concatenate([_padded(part) for part in parts], dtype=np.int32, casting="unsafe"))
        memory = (packed.pin_memory() if self._device.type == "cuda" else packed).to(self._device, non_blocking=True)
        there = [
            part[: len(array)]
            for part, array in zip(memory.split([len(_padded(part)) for part in parts]), parts, strict=True)
        ]
        rows = DeviceRows(
            there[0], there[1], there[3].view(tables.shape), int(query_lens.max()), int(seq_lens.max())
        )  # fmt: skip
        return rows, there[2].view(-1, 2) if self.prefix_spans is not None else None


def _padded(array: np.ndarray) -> np.ndarray:
    """Extends a part by zeros, so that the next one begins at a multiple of `ALIGNMENT` bytes in int32."""
    return np.pad(array, (0, -len(array) % (ALIGNMENT // 4)))
