"""Timelines of engine and workers, as Chrome traces (chrome://tracing, https://ui.perfetto.dev).

Workers record spans into a `SpanList` and send them along with each result; the engine adds its own and writes one
file. All times are CLOCK_MONOTONIC seconds, which processes of one host share. `NO_SPANS` records nothing; a span of
it costs a tenth of a microsecond.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

Span = tuple[str, float, float]
"""(name, begin, end)"""

MAX_SPANS = 1_000_000
"""The most spans that a recording keeps, the newest: about a hundred megabytes as a file."""


class Spans(Protocol):
    """Records how long pieces of work take."""

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Times the body of a `with`."""

    def add(self, name: str, begin: float, end: float) -> None:
        """Records a piece of work that was timed elsewhere."""

    def drain(self) -> list[Span]:
        """The spans recorded since the last call."""


class _NoSpans:
    def __init__(self) -> None:
        self._nothing = contextlib.nullcontext()

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._nothing

    def add(self, name: str, begin: float, end: float) -> None: ...

    def drain(self) -> list[Span]:
        return []


NO_SPANS: Spans = _NoSpans()


class _Timer:
    __slots__ = ("_begin", "_name", "_spans")

    def __init__(self, name: str, spans: deque[Span]) -> None:
        self._name = name
        self._spans = spans

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._spans.append((self._name, self._begin, time.monotonic()))


class SpanList:
    """Always records. Belongs to one thread."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return _Timer(name, self._spans)

    def add(self, name: str, begin: float, end: float) -> None:
        self._spans.append((name, begin, end))

    def drain(self) -> list[Span]:
        spans = list(self._spans)
        self._spans.clear()
        return spans


class Timeline:
    """A sequence of recordings, each with its own file.

    Args:
        folder: made when it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recording = False
        self._engine = SpanList()
        self._worker: deque[Span] = deque(maxlen=MAX_SPANS)
        self._num_files = 0

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Times a piece of the engine's work, if a recording runs."""
        return self._engine.span(name) if self._recording else NO_SPANS.span(name)

    def add(self, spans: Iterable[Span]) -> None:
        """Adds the spans that a worker recorded in a step."""
        if self._recording:
            self._worker.extend(spans)

    def start(self) -> None:
        """Begins a recording, and discards one that runs."""
        self._engine.drain()
        self._worker.clear()
        self._recording = True

    def stop(self) -> Path:
        """Ends the recording and writes it. Raises OSError."""
        self._recording = False
        self._folder.mkdir(parents=True, exist_ok=True)
        self._num_files += 1
        path = self._folder / f"quire-{os.getpid()}-{self._num_files}.trace.json"
        path.write_bytes(chrome_trace({"engine": self._engine.drain(), "worker 0": self._worker}))
        self._worker.clear()
        return path


def chrome_trace(tracks: dict[str, Iterable[Span]]) -> bytes:
    """Tracks of spans, by name, in Chrome's JSON format (microseconds)."""
    events: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "quire"}}]
    for thread, (track, spans) in enumerate(tracks.items(), start=1):
        place = {"pid": 1, "tid": thread}
        events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": track}})
        events += [
            {"ph": "X", **place, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6}
            for name, begin, end in spans
        ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})
