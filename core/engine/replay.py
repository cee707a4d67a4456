"""Runs a recorded schedule again, and finds the first step whose tokens differ."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from quire.core.engine.engine import Executor
from quire.core.errors import ConfigError, QuireError
from quire.core.flight.known_pages import KnownPages
from quire.core.flight.recording import Recording
from quire.core.flight.records import Answered, Cut, Kind, NamedVocabulary, Planned
from quire.core.wire.adapters import LOAD_ADAPTER, Adapter, AdapterLoad, LoadedAdapter
from quire.core.wire.protocol import StepPlan


class Difference(Struct):
    """The first row that brought other tokens."""

    step_id: int
    seconds: float  # since the recording engine's start
    request_id: str
    position: int  # of the first token, in the request's sequence
    recorded: list[int]
    replayed: list[int]


class ReplayReport(Struct):
    """The outcome of a replay.

    Attributes:
        num_left_out: rows that depend on steps before the recording.
        num_unanswered: steps without a result in the recording; they ran here.
        failure: how the step failed here that `failed_step` names; the replay ended there.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_unanswered: int = 0
    difference: Difference | None = None
    failed_step: int | None = None
    failure: str | None = None


class _Kept(NamedTuple):
    plan: StepPlan  # as it ran
    rows: list[int]  # of the recorded plan
    recorded: StepPlan


async def replay(recording: Recording, executor: Executor, vocabularies: Mapping[str, str]) -> ReplayReport:
    """Runs the recorded plans one after another on workers of the same weights. Starts and closes the executor.

    Args:
        vocabularies: the paths of the grammars' vocabularies, by their paths in the recording.

    Raises:
        QuireError: the model cannot be loaded, or the recording is damaged.
    """
    try:
        ready = await executor.start()
        known = KnownPages(ready.kv_groups, ready.block_size, is_whole=recording.is_whole)
        run, answers = _Run(executor, known, vocabularies), _answers(recording)
        for seconds, event in recording.events():
            if isinstance(event, Cut) and event.kind is Kind.PLAN:
                raise ConfigError(
                    f"The plan {seconds:.1f} s after the engine's start has {event.num_bytes} bytes: more than the "
                    "recorder keeps of one; the steps after it cannot run again. Files of --flight-recorder DIR "
                    "have room for larger ones."
                )
            if isinstance(event, Planned) and not await run.step(seconds, event, answers.get(event.plan.step_id)):
                break
    finally:
        await executor.close(hung=False)
    return run.report


def _answers(recording: Recording) -> dict[int, list[list[int]]]:
    return {event.step_id: event.token_ids for _, event in recording.events() if isinstance(event, Answered)}


def vocabulary_names(recording: Recording) -> dict[str, str]:
    """The names of the vocabularies that the recorded grammars use, by path."""
    return {event.path: event.name for _, event in recording.events() if isinstance(event, NamedVocabulary)}


class _Run:
    def __init__(self, executor: Executor, known: KnownPages, vocabularies: Mapping[str, str]) -> None:
        self.report = ReplayReport()
        self._executor = executor
        self._known = known
        self._vocabularies = vocabularies
        self._requests: dict[int, str] = {}  # by slot
        self._adapters: dict[int, Adapter] = {}  # by the workers' slot

    async def step(self, seconds: float, planned: Planned, recorded: list[list[int]] | None) -> bool:
        """Runs one step. Returns False if no other should run: the tokens differ, or the step failed."""
        for new, request_id in zip(planned.plan.admitted, planned.admitted, strict=True):
            self._requests[new.slot] = request_id
        plan, rows = self._known.known_part(self._with_vocabularies(planned.plan))
        self.report.num_steps += 1
        self.report.num_rows += len(rows)
        self.report.num_left_out += len(planned.plan.slots) - len(rows)
        await self._load_adapters(plan)
        self._executor.submit(plan)
        try:
            result = await self._executor.next_result()
        except QuireError as error:
            self.report.failed_step, self.report.failure = plan.step_id, str(error)
            return False
        if recorded is None:
            self.report.num_unanswered += 1
            return True
        return self._compare(seconds, _Kept(plan, rows, planned.plan), recorded, result.token_ids)

    async def _load_adapters(self, plan: StepPlan) -> None:
        """Loads the adapters of requests that enter. Raises ConfigError if one is not there any more."""
        for new in plan.admitted:
            files, before = new.adapter_files, self._adapters.get(new.adapter)
            if files is None or (before is not None and before.digest == files.digest):
                continue
            load = AdapterLoad(files, new.adapter, [] if before is None else [before.digest])
            for answer in await self._executor.call(LOAD_ADAPTER, msgspec.msgpack.encode(load)):
                if (error := msgspec.msgpack.decode(answer, type=LoadedAdapter).error) is not None:
                    raise ConfigError(f"The adapter {files.name!r} of the recording cannot be loaded: {error}")
            self._adapters[new.adapter] = files

    def _with_vocabularies(self, plan: StepPlan) -> StepPlan:
        for new in plan.admitted:
            if new.grammar is not None:
                path = new.grammar.vocabulary_path
                new.grammar = replace(new.grammar, vocabulary_path=self._vocabularies.get(path, path))
        return plan

    def _compare(self, seconds: float, kept: _Kept, recorded: list[list[int]], replayed: list[list[int]]) -> bool:
        wanting = [row for row, num_wanted in enumerate(kept.recorded.num_wanted) if num_wanted]
        expected = dict(zip(wanting, recorded, strict=True))
        ours = [row for row in kept.rows if kept.recorded.num_wanted[row]]
        for row, tokens in zip(ours, replayed, strict=True):
            self.report.num_tokens += len(tokens)
            if tokens != expected[row]:
                position = kept.recorded.num_computed[row] + kept.recorded.num_scheduled[row]
                request_id = self._requests.get(kept.recorded.slots[row], "")
                self.report.difference = Difference(
                    kept.plan.step_id, round(seconds, 3), request_id, position, expected[row], tokens
                )
                return False
        return True
