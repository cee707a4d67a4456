"""Records what an engine does, in a few microseconds a step: the payloads are messages in the form of the wire."""

import os
import time
from typing import Protocol

import msgspec

from quire.core.config.resolved import EngineConfig
from quire.core.flight.records import HEAD, VERSION, Answered, Cut, Ended, Kind, NamedVocabulary, Planned, Preamble
from quire.core.flight.segments import Segments
from quire.core.logging import get_logger
from quire.core.wire.protocol import EngineReady, RequestDelta, StepPlan, StepResult, encoder

logger = get_logger(__name__)


class Recorder(Protocol):
    """Takes what an engine does."""

    def start(self, config: EngineConfig, ready: EngineReady) -> None:
        """The model is loaded. What came before is not recorded."""

    def add_input(self, payload: bytes) -> None:
        """An encoded message of a frontend."""

    def add_plan(self, plan: StepPlan, admitted: list[str]) -> None:
        """A plan, and the ids of the requests that it admits, in order."""

    def add_result(self, result: StepResult) -> None:
        """The workers' answer to a plan."""

    def add_deltas(self, deltas: list[RequestDelta]) -> None:
        """What a step brought; the requests that end are recorded."""

    def add_fault(self, text: str) -> None:
        """A failure of the engine or of a worker."""


class _NoRecorder:
    def start(self, config: EngineConfig, ready: EngineReady) -> None: ...

    def add_input(self, payload: bytes) -> None: ...

    def add_plan(self, plan: StepPlan, admitted: list[str]) -> None: ...

    def add_result(self, result: StepResult) -> None: ...

    def add_deltas(self, deltas: list[RequestDelta]) -> None: ...

    def add_fault(self, text: str) -> None: ...


NO_RECORDER: Recorder = _NoRecorder()


class FlightRecorder:
    """Writes records, each with one system call, so that those of a process that is killed are whole.

    A disk that is full or gone ends the recording, and nothing else.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._most = segments.num_bytes // 2  # of one record
        self._encoder = encoder()
        self._buffer = bytearray()
        self._preamble: Preamble | None = None
        self._file: int | None = None
        self._room = 0
        self._sequence = 0
        self._vocabularies: dict[str, str] = {}

    def start(self, config: EngineConfig, ready: EngineReady) -> None:
        self._preamble = Preamble(VERSION, 0, time.time(), time.monotonic(), os.getpid(), config, ready)
        self._turn()

    def add_input(self, payload: bytes) -> None:
        self._add(Kind.INPUT, payload)

    def add_plan(self, plan: StepPlan, admitted: list[str]) -> None:
        for new in plan.admitted:
            if new.grammar is not None and new.grammar.vocabulary_path not in self._vocabularies:
                self._name(new.grammar.vocabulary_path)
        self._add_struct(Kind.PLAN, Planned(plan, admitted))

    def add_result(self, result: StepResult) -> None:
        self._add_struct(Kind.RESULT, Answered(result.step_id, result.token_ids))

    def add_deltas(self, deltas: list[RequestDelta]) -> None:
        ended = [(each.request_id, str(each.finish_reason)) for each in deltas if each.finish_reason is not None]
        if ended:
            self._add_struct(Kind.ENDED, Ended(ended))

    def add_fault(self, text: str) -> None:
        self._add(Kind.FAULT, text.encode("utf-8", "replace"))

    def _add_struct(self, kind: Kind, payload: msgspec.Struct) -> None:
        self._encoder.encode_into(payload, self._buffer)
        self._add(kind, self._buffer)

    def _add(self, kind: Kind, payload: bytes | bytearray) -> None:
        if self._file is None:
            return
        if len(payload) > self._most:
            payload = self._encoder.encode(Cut(kind, len(payload)))
            kind = Kind.CUT
        num_bytes = HEAD.size + len(payload)
        if num_bytes > self._room:
            self._turn()
        self._write(kind, payload)

    def _turn(self) -> None:
        """Begins the next file."""
        assert self._preamble is not None
        try:
            self._file = self._segments.next_file()
        except OSError as error:
            self._give_up(error)
            return
        self._room = self._segments.num_bytes
        self._preamble.sequence, self._sequence = self._sequence, self._sequence + 1
        self._write(Kind.PREAMBLE, self._encoder.encode(self._preamble))
        for path, name in self._vocabularies.items():
            self._write(Kind.VOCABULARY, self._encoder.encode(NamedVocabulary(path, name)))

    def _write(self, kind: Kind, payload: bytes | bytearray) -> None:
        if self._file is None:
            return
        head = HEAD.pack(len(payload), kind, time.monotonic())
        num_bytes = len(head) + len(payload)
        try:
            written = os.writev(self._file, (head, payload))
        except OSError as error:
            self._give_up(error)
            return
        if written < num_bytes:  # a nearly full disk
            self._give_up(OSError("the disk is full"))
        self._room -= num_bytes

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning("the flight recorder stops: %s", error)

    def _name(self, path: str) -> None:
        try:
            name = os.readlink(path)
        except OSError:
            name = path
        self._vocabularies[path] = name
        self._add_struct(Kind.VOCABULARY, NamedVocabulary(path, name))
