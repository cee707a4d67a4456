"""One run: requests arrive, the router places them, engines step, some die and come back. Time is virtual.

The router, its loads and the schedulers are the real ones. A frontend hears of a step when it ends, and of a death some
seconds after it; until then requests still go to the dead engine.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from quire.core.routing.engine_load import EngineLoad
from quire.core.routing.prompt_blocks import prompt_blocks
from quire.core.routing.router import FULL, Router, RoutingRules
from quire.core.wire.protocol import EngineRequest, RequestDelta, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.labs.fleet.engine import EngineShape, NullEngine
from quire.frontend.labs.fleet.workload import Arrival

SAMPLE_SECONDS = 0.5
"""Virtual seconds between two looks at how busy all engines are."""


class Deaths(Struct, frozen=True, kw_only=True):
    """Engines that die together, half-way through the arrivals."""

    dying: Annotated[float, Meta(ge=0, lt=1, description="Share of the engines that die half-way.")] = 0.05
    notice_seconds: Annotated[float, Meta(ge=0, description="Until a death is noticed.")] = 1.0
    restart_seconds: Annotated[float, Meta(ge=0, description="From then until a new engine serves.")] = 5.0


@dataclass
class Tracked:
    """A request as its frontend knows it."""

    arrival: Arrival
    delivered: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_moves: int = 0
    first_token_at: float | None = None
    done_at: float | None = None
    failed: str | None = None


@dataclass
class Run:
    """The record of one run.

    Attributes:
        route_seconds: processor time of each placement: the prompt's blocks, the choice, and the router's notes.
        busy: requests of each engine that serves, at each look.
        seconds: virtual time until the last request was answered.
    """

    requests: list[Tracked]
    route_seconds: list[float]
    busy: list[np.ndarray]
    seconds: float


class Simulation:
    """A fleet. `run` may be called once."""

    def __init__(
        self, num_engines: int, shape: EngineShape, rules: RoutingRules, deaths: Deaths, longest: int, seed: int
    ) -> None:
        self._shape = shape
        self._rules = rules
        self._deaths = deaths
        self._longest = longest
        self._random = np.random.default_rng(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._engines: list[NullEngine | None] = [self._new_engine() for _ in range(num_engines)]
        self._loads = [EngineLoad() for _ in range(num_engines)]
        self._own: list[set[int]] = [set() for _ in range(num_engines)]  # unfinished requests sent to each engine
        self._router = Router(num_engines, rules)
        for engine in range(num_engines):
            self._router.set_capacity(engine, shape.cache_tokens)
            self._router.set_load(engine, 0)
        self._requests: list[Tracked] = []
        self._route_seconds: list[float] = []
        self._busy: list[np.ndarray] = []

    def run(self, arrivals: Iterable[Arrival], seconds: float) -> Run:
        """Runs until all requests are answered; `seconds` is the span of the arrivals."""
        if self._deaths.dying:
            self._at(seconds / 2, self._die)
        self._at(SAMPLE_SECONDS, lambda: self._look(seconds))
        coming = iter(arrivals)
        self._expect(coming)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return Run(self._requests, self._route_seconds, self._busy, self._now)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _new_engine(self) -> NullEngine:
        return NullEngine(self._shape, self._longest, lambda: self._now)

    # ------------------------------------------------------------------------------------------------------- requests

    def _expect(self, coming: Iterator[Arrival]) -> None:
        arrival = next(coming, None)
        if arrival is None:
            return

        def arrive() -> None:
            self._requests.append(Tracked(arrival))
            self._place(len(self._requests) - 1)
            self._expect(coming)

        self._at(arrival.at, arrive)

    def _place(self, number: int) -> None:
        """Lets the router choose, as a frontend does, and sends the request with its delivered tokens."""
        request = self._requests[number]
        begin = time.thread_time()
        blocks = prompt_blocks(request.arrival.prompt, None, None, block_tokens=self._rules.block_tokens)
        choice = self._router.choose(blocks)
        if choice is None:  # no engine is known to serve: try again when one is back
            self._at(self._now + SAMPLE_SECONDS, lambda: self._place(number))
            return
        load = self._loads[choice.engine]
        num_tokens = len(request.arrival.prompt) + len(request.delivered)
        num_new_tokens = num_tokens - self._router.add_prompt(choice.engine, blocks)
        load.add(1)
        load.send(1, num_new_tokens)
        self._router.set_load(choice.engine, load.value)
        self._route_seconds.append(time.thread_time() - begin)
        self._own[choice.engine].add(number)
        engine = self._engines[choice.engine]
        if engine is not None:  # else it is dead, and nobody knows yet
            start = SequenceStart(str(number), seed=0, output_token_ids=request.delivered)
            sampling = SamplingParams(max_tokens=request.arrival.output_len, ignore_eos=True)
            wire = EngineRequest([start], request.arrival.prompt, sampling, num_new_tokens=num_new_tokens)
            self._take(choice.engine, engine.add(wire))
            self._step(choice.engine, engine)

    def _take(self, number: int, deltas: list[RequestDelta]) -> None:
        """Handles an engine's deltas as a frontend does."""
        for delta in deltas:
            index = int(delta.request_id)
            request = self._requests[index]
            if request.first_token_at is None and delta.token_ids:
                request.first_token_at = self._now
                request.num_cached = delta.num_cached_tokens
            request.delivered.extend(delta.token_ids)
            if delta.finish_reason is not None:
                request.done_at = self._now
                request.failed = None if delta.failure is None else delta.failure.message
                self._own[number].discard(index)
                self._loads[number].remove(1)

    # -------------------------------------------------------------------------------------------------------- engines

    def _step(self, number: int, engine: NullEngine) -> None:
        """Begins a step if the engine is idle."""
        if engine.is_busy:
            return
        seconds = engine.begin()
        if seconds is not None:
            self._at(self._now + seconds, lambda: self._end_step(number, engine))

    def _end_step(self, number: int, engine: NullEngine) -> None:
        if self._engines[number] is not engine:
            return  # it died meanwhile
        self._take(number, engine.end())
        self._loads[number].report(engine.stats)
        self._router.set_load(number, self._loads[number].value)
        self._step(number, engine)

    def _die(self) -> None:
        num_dying = max(1, round(self._deaths.dying * len(self._engines)))
        for number in self._random.choice(len(self._engines), num_dying, replace=False).tolist():
            self._engines[number] = None
        dead = [number for number, engine in enumerate(self._engines) if engine is None]
        self._at(self._now + self._deaths.notice_seconds, lambda: self._notice(dead))
        self._at(self._now + self._deaths.notice_seconds + self._deaths.restart_seconds, lambda: self._restart(dead))

    def _notice(self, dead: list[int]) -> None:
        """Moves the requests of dead engines to others; their streams go on."""
        moved: list[int] = []
        for number in dead:
            self._loads[number].forget()
            self._router.forget(number)
            self._router.set_load(number, FULL)
            self._loads[number].remove(len(self._own[number]))
            moved += sorted(self._own[number])
            self._own[number].clear()
        for index in moved:
            self._requests[index].num_moves += 1
            self._place(index)

    def _restart(self, dead: list[int]) -> None:
        for number in dead:
            self._engines[number] = self._new_engine()
            self._router.set_load(number, self._loads[number].value)

    def _look(self, seconds: float) -> None:
        """Notes how many requests each engine has."""
        alive = [len(own) for own, engine in zip(self._own, self._engines, strict=True) if engine is not None]
        if self._now <= seconds:
            self._busy.append(np.asarray(alive))
            self._at(self._now + SAMPLE_SECONDS, lambda: self._look(seconds))
