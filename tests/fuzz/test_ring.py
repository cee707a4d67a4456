"""Rings: any messages come out as they went in; and messages of the wire that are damaged are refused as such."""

import contextlib
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.wire.protocol import NewSlot, StepPlan, StepResult, WorkerInput, WorkerOutput, encoder
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.processes.ring import RingReader, RingWriter
from quire.executor.processes.ring_memory import create_ring
from tests.fuzz.examples import fuzzed, mutated

NEW = NewSlot(0, [1, 2, 3], 3, [[4]], SamplingParams(temperature=0.5))
PLAN = StepPlan(3, [1], [NEW], [0], [0], [3], [1], [(2, [[5]])])


@fuzzed(60)
@given(st.lists(st.one_of(st.binary(max_size=90), st.integers(0, 400).map(bytes)), max_size=30), st.integers(1, 3))
def test_messages_come_out_as_they_went_in(messages: list[bytes], num_readers: int) -> None:
    """Messages longer than a slot spill; a full ring refuses, and takes more when all have read."""
    with (
        closing(create_ring(num_readers, num_slots=4, slot_bytes=64)) as handle,
        closing(RingWriter(handle, name="fuzz")) as writer,
    ):
        readers = [RingReader(handle, index) for index in range(num_readers)]
        found: list[list[bytes]] = [[] for _ in readers]
        for message in messages:
            while not writer.try_write(message):
                for reader, read in zip(readers, found, strict=True):
                    got = reader.try_read()
                    assert got is not None
                    read.append(got)
        for reader, read in zip(readers, found, strict=True):
            while (got := reader.try_read()) is not None:
                read.append(got)
            reader.close()
        assert found == [messages] * num_readers


@pytest.mark.parametrize(
    ("message", "kind"), [(PLAN, WorkerInput), (StepResult(3, [[7]]), WorkerOutput)], ids=["plan", "result"]
)
def test_damaged_messages_are_refused_as_such(message: msgspec.Struct, kind: Any) -> None:
    decoder = msgspec.msgpack.Decoder(kind)

    @fuzzed(150)
    @given(mutated(encoder().encode(message)))
    def run(data: bytes) -> None:
        with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError):
            decoder.decode(data)

    run()
