"""The rows of a step on the device: those of the host, in one copy or none, and no host while a step is recorded."""

import numpy as np
import pytest
import torch

from quire.ops.backend import DeviceRows
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.batch import TritonBatch
from quire.ops.triton.graphs import UnrecordableError
from tests.executor.pretend_device import PretendDevice

QUERY_LENS, SEQ_LENS = np.array([1, 5, 3]), np.array([9, 5, 17])
TABLES = np.arange(15, dtype=np.int32).reshape(3, 5)


def test_rows_are_those_of_the_host() -> None:
    with PretendDevice():
        ops, slots = TritonBackend(), torch.arange(9, device="cuda")
        for spans in (None, np.array([[0, 0], [1, 4], [0, 2]])):
            batch = ops.attention_batch(QUERY_LENS, SEQ_LENS, TABLES, slots, block_size=4, prefix_spans=spans)
            rows = batch.rows
            assert rows.query_starts.tolist() == [0, 1, 6, 9]
            assert rows.seq_lens.tolist() == SEQ_LENS.tolist()
            assert rows.block_tables.tolist() == TABLES.tolist()
            assert rows.slot_mapping is slots
            assert (None if rows.prefix_spans is None else rows.prefix_spans.tolist()) == (
                None if spans is None else spans.tolist()
            )
            assert (rows.block_size, rows.max_query_len, rows.max_seq_len) == (4, 5, 17)
            tensors = (rows.query_starts, rows.seq_lens, rows.block_tables)
            assert not any(each.storage_offset() % 4 for each in tensors), "kernels take pointers to whole 16 bytes"
            assert {(each.device.type, each.dtype) for each in tensors} == {("cuda", torch.int32)}
            assert batch.rows is rows, "all layers share one copy"


def test_rows_that_are_there_are_not_copied() -> None:
    with PretendDevice() as device:
        there = DeviceRows(*(torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(3)), 1, 512)
        ones, slots = np.ones(3, np.int64), torch.arange(3, device="cuda")
        batch = TritonBackend().attention_batch(ones, SEQ_LENS, TABLES, slots, block_size=4, there=there)
        with device.without_reads():
            rows = batch.rows
        assert rows.query_starts is there.query_starts
        assert rows.seq_lens is there.seq_lens
        assert rows.block_tables is there.block_tables
        assert (rows.max_query_len, rows.max_seq_len) == (1, 512)


def test_a_recording_does_not_depend_on_arrays_of_the_host() -> None:
    is_recorded = False
    slots = torch.arange(3)
    batch = TritonBatch(QUERY_LENS, SEQ_LENS, TABLES, slots, 4, None, None, lambda: is_recorded)
    assert batch.seq_lens is SEQ_LENS
    is_recorded = True
    for name in ("query_lens", "seq_lens", "block_tables"):
        with pytest.raises(UnrecordableError, match=f"reads {name} on the host"):
            getattr(batch, name)
