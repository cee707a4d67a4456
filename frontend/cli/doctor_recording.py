"""What stands out of an engine's last minutes, by its flight recorder."""

import statistics
import time
from collections.abc import Iterator

from quire.core.flight.recording import Event, Recording
from quire.core.flight.records import Answered, Cut, Ended, Planned
from quire.core.wire.protocol import AbortReplies, AbortRequests, EngineRequest

_SLOW = 10
"""A step is slow if it takes so many times the median."""
_NAMED = 3
_LONG_SECONDS = 1.0


class _Steps:
    """The steps of a recording: when each was planned and answered, and the rows of those without an answer."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[float, Planned]] = {}
        self.seconds: dict[int, float] = {}
        self.num_tokens = 0
        self._last_answer = 0.0

    def plan(self, at: float, planned: Planned) -> None:
        self.open[planned.plan.step_id] = (at, planned)

    def answer(self, at: float, answered: Answered) -> None:
        self.num_tokens += sum(map(len, answered.token_ids))
        if (found := self.open.pop(answered.step_id, None)) is not None:
            # A step planned ahead begins when the one before it ends.
            self.seconds[answered.step_id] = at - max(found[0], self._last_answer)
        self._last_answer = at


class _Requests:
    """The requests of a recording: when each came, was admitted and ended."""

    def __init__(self) -> None:
        self.waiting: dict[str, float] = {}
        self.running: dict[int, str] = {}  # by slot
        self.queued_seconds: list[float] = []
        self.num_arrived = self.num_aborted = 0
        self.ends: dict[str, int] = {}
        self._ended: set[str] = set()

    def add(self, at: float, request: EngineRequest) -> None:
        for start in request.sequences:
            self.num_arrived += 1
            self.waiting[start.request_id] = at

    def admit(self, at: float, planned: Planned) -> None:
        for slot in planned.plan.released:
            self.running.pop(slot, None)
        for new, request_id in zip(planned.plan.admitted, planned.admitted, strict=True):
            self.running[new.slot] = request_id
            if (came := self.waiting.pop(request_id, None)) is not None:
                self.queued_seconds.append(at - came)

    def abort(self, request_ids: list[str]) -> None:
        self.num_aborted += len(request_ids)
        for request_id in request_ids:
            self.waiting.pop(request_id, None)
            self._ended.add(request_id)

    def end(self, ended: Ended) -> None:
        for request_id, reason in ended.requests:
            self.ends[reason] = self.ends.get(reason, 0) + 1
            self.waiting.pop(request_id, None)
            self._ended.add(request_id)

    @property
    def unfinished(self) -> list[str]:
        """Requests that ran when the recording ends."""
        return [each for each in self.running.values() if each and each not in self._ended]


def examine_recording(recording: Recording) -> Iterator[str]:
    """Indented lines: the engine, its work, and a line for each thing that stands out. Raises ConfigError."""
    steps, requests, faults, last = _Steps(), _Requests(), list[tuple[float, str]](), 0.0
    num_cut = 0
    for at, event in recording.events():
        last = max(last, at)
        _take(event, at, steps, requests)
        if isinstance(event, str):
            faults.append((at, event))
        num_cut += isinstance(event, Cut)
    yield from _engine(recording, last)
    yield from _work(steps, requests)
    found = [*_slow_steps(steps), *_unanswered(steps, last), *_waits(requests)]
    found += [f"  {num_cut} records were too large to be kept."] * bool(num_cut)
    found += [f"  After {at:.1f} s: {text}" for at, text in faults]
    if requests.unfinished and (faults or steps.open):
        found.append(f"  Unfinished then: {_names(requests.unfinished)}.")
    yield from found or ["  Nothing stands out."]


def _take(event: Event, at: float, steps: _Steps, requests: _Requests) -> None:
    match event:
        case EngineRequest():
            requests.add(at, event)
        case AbortRequests():
            requests.abort(event.request_ids)
        case AbortReplies():
            requests.abort(event.reply_ids)
        case Planned():
            steps.plan(at, event)
            requests.admit(at, event)
        case Answered():
            steps.answer(at, event)
        case Ended():
            requests.end(event)


def _engine(recording: Recording, last: float) -> Iterator[str]:
    preamble = recording.preamble
    config, ready = preamble.config, preamble.ready
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(preamble.unix_time))
    ranks = config.layout.num_workers
    yield (
        f"  {config.process_name} of {config.spec.name}, process {preamble.pid}, ready at {started}: "
        f"{ready.device_name}, {config.executor} with {ranks} worker{'s' * (ranks > 1)}, "
        f"{ready.num_pages} pages of {ready.block_size} tokens, "
        f"at most {config.limits.max_num_seqs} requests and {config.limits.max_num_batched_tokens} tokens a step"
    )
    part = "whole life" if recording.is_whole else "end"
    yield f"  recorded: its {part}, until {last:.1f} s after that moment"


def _work(steps: _Steps, requests: _Requests) -> Iterator[str]:
    times = sorted(steps.seconds.values())
    text = f"  {len(times)} steps, {steps.num_tokens} tokens"
    if times:
        text += f"; a step took {_ms(statistics.median(times))} in the median, {_ms(times[-1])} at most"
    yield text
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(requests.ends.items())) or "none"
    yield f"  requests: {requests.num_arrived} came, {requests.num_aborted} were aborted; ended: {ends}"


def _slow_steps(steps: _Steps) -> Iterator[str]:
    if len(steps.seconds) < _SLOW:
        return
    median = statistics.median(steps.seconds.values())
    slow = sorted(((each, number) for number, each in steps.seconds.items() if each > _SLOW * median), reverse=True)
    if slow:
        named = ", ".join(f"{number} ({_ms(seconds)})" for seconds, number in slow[:_NAMED])
        yield f"  {len(slow)} steps took more than {_SLOW} times the median: {named}."


def _unanswered(steps: _Steps, last: float) -> Iterator[str]:
    if not steps.open:
        return
    number, (at, planned) = min(steps.open.items())
    plan = planned.plan
    yield (
        f"  Step {number} has no result; it was planned {last - at:.2f} s before the end, with "
        f"{len(plan.slots)} rows and {sum(plan.num_scheduled)} tokens."
    )


def _waits(requests: _Requests) -> Iterator[str]:
    long = [seconds for seconds in requests.queued_seconds if seconds > _LONG_SECONDS]
    if long:
        yield f"  {len(long)} requests waited more than {_LONG_SECONDS:g} s to be admitted, at most {max(long):.1f} s."
    if requests.waiting:
        yield f"  {len(requests.waiting)} requests were still waiting at the end."


def _names(request_ids: list[str]) -> str:
    more = len(request_ids) - _NAMED
    return ", ".join(request_ids[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
