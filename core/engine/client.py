"""A frontend's handle on its engines: submits requests, hands back deltas, and survives an engine's death.

The client keeps the delivered tokens of each unfinished sequence. When an engine dies or goes silent, its supervisor
starts another. Meanwhile the sequences move to other engines with room, or wait for the next engine. Either way they
are submitted with their delivered tokens. Sampling is a function of (seed, position), so a stream continues as if
nothing had happened. A request that an engine has had in two crashes, without a token between them, is a suspect: it is
tried alone, and fails if that ends in a crash as well. An engine that somebody outside ended, or that ends because
another one is missing, has not crashed.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from msgspec.structs import replace

from quire.core.engine.engine_handle import EngineHandle
from quire.core.engine.engine_life import EngineMessage
from quire.core.engine.engine_link import EngineLink
from quire.core.engine.engine_selection import make_selector
from quire.core.engine.failures import fault_of
from quire.core.engine.fleet import Fleet, agreed
from quire.core.engine.fleet_status import EngineStatus, FleetStatus
from quire.core.engine.launcher import Launcher
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.engine.submitted import OnDelta, Submitted, Tracked, continued, num_tokens
from quire.core.errors import QuireError
from quire.core.logging import get_logger
from quire.core.routing.router import RoutingRules
from quire.core.wire.adapters import Adapter
from quire.core.wire.protocol import (
    EngineReady,
    EngineRequest,
    FinishReason,
    Heartbeat,
    RequestDelta,
    SchedulerStats,
    StepOutputs,
)
from quire.core.wire.row_outputs import RequestFailure

logger = get_logger(__name__)

OnPlaced = Callable[[int, Sequence[int]], None]


class EngineClient:
    """Use from one event loop.

    Args:
        launchers: of each engine; each starts its engine, the first time and after a crash.
        num_slots: sequences that an engine runs at once: an engine that has so many takes none from one that died.
        on_stats: called with an engine's number and its scheduler's statistics of every step and heartbeat.
        restarts: makes the rules that decide whether an engine that ended is followed by another.
        rules: how requests are divided between engines; the usual rules when None.
        known: what each engine can do, if they ran before this client came. Then one engine is enough to start with.
        coupled: the engines cannot run without one another, so they end and are restarted together.
        on_placed: called with an engine's number and the blocks (`prompt_blocks`) of each prompt that it is sent, for
            other frontends' `on_placed_elsewhere`.
        on_pause: called with an engine's number and the seconds for which a sequence stood still because of a crash.
        on_replay: called with an engine's number when it is sent a request that another engine had before.

    Attributes:
        ready: what each engine can do, by number; empty until all have started.
    """

    def __init__(
        self,
        launchers: Sequence[Launcher],
        *,
        num_slots: int,
        on_stats: Callable[[int, SchedulerStats], None] | None = None,
        restarts: Callable[[], RestartPolicy] = RestartPolicy,
        rules: RoutingRules | None = None,
        known: Sequence[EngineReady] = (),
        coupled: bool = False,
        on_placed: OnPlaced | None = None,
        on_pause: Callable[[int, float], None] | None = None,
        on_replay: Callable[[int], None] | None = None,
    ) -> None:
        self._on_placed = on_placed or (lambda engine, blocks: None)
        self._on_stats = on_stats or (lambda engine, stats: None)
        self._on_pause = on_pause or (lambda engine, seconds: None)
        self._on_replay = on_replay or (lambda engine: None)
        self._tracked: dict[str, Tracked] = {}
        self._paused: dict[str, float] = {}  # since when each sequence stands still, because of a crash
        self._trials: dict[int, Submitted] = {}  # the suspect that an engine has alone, by the engine's number
        self._deserted: set[int] = set()  # engines whose suspect was aborted, and which gave no token since
        self._known = list(known)
        self.ready: list[EngineReady] = []
        self._fleet = Fleet(launchers, self, coupled=coupled, restarts=restarts)
        self._links = [EngineLink(engine) for engine in self._fleet.engines]
        self._selector = make_selector(self._links, num_slots, rules)

    async def start(self) -> EngineReady:
        """Starts the engines, once; later calls wait for the same start. Returns their capacities' sums and the
        shortest of their limits on a request.

        Raises:
            ConfigError: a setting, the checkpoint or the memory is at fault, or the engines differ.
            EngineDeadError: an engine ended without saying why.
        """
        if self._known:
            await self._fleet.start_one()
            self.ready = self._known
        else:
            self.ready = await self._fleet.start()
        return agreed(self.ready)

    @property
    def num_unfinished(self) -> int:
        """Sequences in flight."""
        return len(self._tracked)

    @property
    def engine_pids(self) -> list[int | None]:
        """Process ids of the running engines, by number. An id changes after a crash, and is None while no engine
        runs."""
        return [engine.pid for engine in self._fleet.engines]

    def submit(self, request: EngineRequest, on_deltas: Sequence[OnDelta], *, engine: int | None = None) -> int:
        """Submits a request. `on_deltas` has a callback for each sequence. A callback gets its sequence's deltas in
        order, on this loop; the last delta has a `finish_reason`.

        Args:
            engine: the number of the engine that shall have it, unless that dies; None lets the router choose.

        Returns:
            The number of the engine that has it. If that dies, another may finish it.

        Raises:
            EngineDeadError: the engines are gone for good.
        """
        self.check_health()
        blocks = self._selector.blocks(request)
        link = self._selector.choose(blocks) if engine is None else self._links[engine]
        submitted = Submitted(request, len(request.sequences), blocks, link)
        for start, on_delta in zip(request.sequences, on_deltas, strict=True):
            self._tracked[start.request_id] = Tracked(submitted, start, on_delta, list(start.output_token_ids))
        self._place(submitted, request)
        return link.number

    def abort(self, request_ids: list[str]) -> None:
        """Forgets sequences, here at once and in the engine within a step. Ignores unknown ids."""
        by_link: defaultdict[int, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                by_link[tracked.submitted.link.number].append(request_id)
        for number, known in by_link.items():
            self._links[number].abort(known)
            for request_id in known:
                self._forget(request_id)

    def abort_replies(self, reply_ids: list[str], tenant: str = "") -> None:
        """Ends all requests of some replies within a step, other frontends' included. Ids that are unknown or another
        tenant's are ignored."""
        for link in self._links:
            link.abort_replies(reply_ids, tenant)

    def on_placed_elsewhere(self, engine: int, blocks: Sequence[int]) -> None:
        """Notes that another frontend of the same engines has sent a prompt of these blocks to engine number
        `engine`."""
        self._selector.on_placed_elsewhere(engine, blocks)

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Drops cached pages that no request uses. Returns True if all engines' caches are empty then.

        Args:
            preempt_running: take the pages of running requests too; they are computed again, and their streams go on.

        Raises:
            EngineDeadError: the engines are gone for good.
        """
        await self.start()
        self.check_health()
        links = [link for link in self._links if not link.engine.is_dead]
        answers = await asyncio.gather(*(link.reset_prefix_cache(preempt_running=preempt_running) for link in links))
        for link in links:
            self._selector.on_empty(link)
        return all(answers)

    async def profile(self, active: bool) -> str | None:
        """Starts or ends a recording of each engine's timeline. At the end, returns the path of the first one's file.

        Raises:
            EngineError: a file cannot be written, or an engine went away; EngineDeadError if it is gone for good.
        """
        await self.start()
        first, *_ = await asyncio.gather(*(link.profile(active) for link in self._links))
        return first

    async def call_workers(self, name: str, payload: bytes = b"") -> list[bytes]:
        """Runs a `WorkerCall` on every worker between two steps. Returns the answers engine by engine, by rank.

        Raises:
            EngineError: a worker failed at it, or an engine went away; EngineDeadError if it is gone for good.
        """
        await self.start()
        return list(chain(*await asyncio.gather(*(link.call_workers(name, payload) for link in self._links))))

    async def prepare_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter into the memory of all engines' hosts, so that it is there when a request comes.

        Raises:
            ParameterError: it does not fit the model, or cannot be read.
            UnavailableError: its files have not come in time.
            EngineError: an engine ended meanwhile; EngineDeadError if all are gone for good.
        """
        await self.start()
        self.check_health()
        links = [link for link in self._links if not link.engine.is_dead]
        await asyncio.gather(*(link.prepare_adapter(adapter) for link in links))

    def check_health(self) -> None:
        """Raises EngineDeadError when all engines are gone for good. An engine that is being restarted is healthy."""
        self._fleet.check_health()

    def status(self) -> FleetStatus:
        """The state of all engines, and of each."""
        return self._fleet.status()

    def status_of(self, number: int) -> EngineStatus:
        """The state of the engine with a number."""
        return self._fleet.engines[number].status()

    async def close(self) -> None:
        """Fails unfinished requests and stops the engines: serving ones in order, all others by force."""
        self._fail(self._tracked, "The server shut down while the request ran.")
        await self._fleet.close()

    def kill(self) -> None:
        """Kills the engines, and waits a few seconds for the processes of this host. For interpreter exit, and for use
        outside an event loop."""
        self._fleet.kill()

    # ---------------------------------------------------------------------------------------- callbacks of the engines

    def has_work(self, engine: EngineHandle) -> bool:
        return self._links[engine.number].load.num_own > 0

    def on_ready(self, engine: EngineHandle, ready: EngineReady) -> None:
        link = self._links[engine.number]
        link.holds_requests = True
        self._selector.on_ready(link, ready)
        self._send_waiting(link)
        for other in self._links:
            if not other.holds_requests:
                self._evacuate(other)

    def on_message(self, engine: EngineHandle, message: EngineMessage) -> None:
        link = self._links[engine.number]
        match message:
            case StepOutputs():
                link.translate_times(message)
                if self._paused:
                    self._end_pauses(link.number, message.deltas)
                self._deliver(message.deltas)
                if self._deserted and any(delta.token_ids for delta in message.deltas):
                    self._deserted.discard(link.number)
                if link.number in self._trials:
                    self._judge_trial(link)
                self._on_load(link, message.stats)
            case Heartbeat():
                self._on_load(link, message.stats)
            case _:
                link.on_answer(message)

    def _on_load(self, link: EngineLink, stats: SchedulerStats) -> None:
        link.load.report(stats)
        self._selector.on_load(link)
        self._on_stats(link.number, stats)

    def on_crash(self, engine: EngineHandle, end: QuireError) -> None:
        link = self._links[engine.number]
        link.on_crash()
        self._selector.on_empty(link)
        on_trial = self._trials.pop(link.number, None)
        present = [each for each in self._unfinished_on(link) if each[0].is_sent]
        for submitted, sequences in present:
            submitted.is_sent = False
            for each in sequences:
                self._paused.setdefault(each.start.request_id, engine.heard_at or time.monotonic())
        if link.number in self._deserted:  # the step may still have been that of the suspect
            self._deserted.discard(link.number)
        elif fault_of(end) == "own":
            self._blame(present, on_trial)
        self._evacuate(link)

    def _blame(self, present: list[tuple[Submitted, list[Tracked]]], on_trial: Submitted | None) -> None:
        """Notes a crash of an engine that had requests. Fails the one on trial, which had the engine to itself."""
        for submitted, sequences in present:
            if on_trial is None:
                submitted.on_crash(sequences)
            elif submitted is not on_trial:
                submitted.blame = 0  # the culprit is found
            else:
                self._fail(
                    [each.start.request_id for each in sequences],
                    f"The engine crashed {submitted.blame + 1} times while it had this request, at last as it tried it "
                    "alone, so it is not tried again.",
                )

    def on_dead(self, engine: EngineHandle, error: QuireError) -> None:
        if self._fleet.is_dead:
            self._fail(self._tracked, f"The engine is gone: {error}")
            return
        if self._fleet.give_up_with(error) or not self.ready:
            return  # each engine reports its own end, or `start` raises this one
        logger.error("engine %d is gone for good, and the others serve on: %s", engine.number, error)
        self._evacuate(self._links[engine.number])

    # ---------------------------------------------------------------------------------------------------- the requests

    def _place(self, submitted: Submitted, request: EngineRequest) -> None:
        """Assigns a request, or its unfinished part, to its engine. It is sent later if the engine is not ready, or
        has a request on trial."""
        submitted.link.place(request)
        if submitted.link.engine.is_ready and submitted.link.number not in self._trials:
            self._send(submitted, request)

    def _send(self, submitted: Submitted, request: EngineRequest) -> None:
        """Sends a request, or its unfinished part, to its engine, which is ready, and counts its tokens as load."""
        link = submitted.link
        num_cached = self._selector.add_prompt(link, submitted.blocks)
        link.send(replace(request, num_new_tokens=num_tokens(request) - num_cached))
        self._selector.on_load(link)
        submitted.on_sent(request)
        if submitted.num_sent > 1:
            self._on_replay(link.number)
        if submitted.blocks:
            self._on_placed(link.number, submitted.blocks)

    def _send_waiting(self, link: EngineLink) -> None:
        """Sends a ready engine the requests that wait for it; if there are suspects among them, one of these alone."""
        waiting = [each for each in self._unfinished_on(link) if not each[0].is_sent]
        suspects = [each for each in waiting if each[0].is_suspect]
        if suspects:
            self._trials[link.number] = suspects[0][0]
        for submitted, sequences in suspects[:1] or waiting:
            self._send(submitted, continued(submitted.request, sequences))

    def _judge_trial(self, link: EngineLink) -> None:
        """Acquits the request on trial once it has got a token; the others follow."""
        submitted = self._trials[link.number]
        sequences = [each for each in self._tracked.values() if each.submitted is submitted]
        if submitted.has_progressed(sequences):
            self._end_trial(link)

    def _end_trial(self, link: EngineLink) -> None:
        self._trials.pop(link.number).blame = 0
        if link.engine.is_ready:
            self._send_waiting(link)

    def _end_pauses(self, engine: int, deltas: list[RequestDelta]) -> None:
        """Notes that these sequences go on."""
        now = time.monotonic()
        for delta in deltas:
            if (since := self._paused.pop(delta.request_id, None)) is not None:
                self._on_pause(engine, now - since)

    def _evacuate(self, link: EngineLink) -> None:
        """Moves the requests of an engine that does not run to other engines. Requests for which no engine has room
        wait for the next engine, as suspects do; if there will be none, they move all the same."""
        if self._fleet.is_coupled:
            return
        for submitted, sequences in self._unfinished_on(link):
            if submitted.is_suspect and not link.engine.is_dead:
                continue
            if link.engine.is_dead:
                refuge = self._selector.refuge(submitted.blocks, len(sequences), even_full=True)
                refuge = refuge or self._selector.choose(submitted.blocks)
            else:
                refuge = self._selector.refuge(submitted.blocks, len(sequences), even_full=False)
            if refuge is not None:
                link.remove(submitted.request, len(sequences), is_last=True)
                submitted.link, submitted.is_sent = refuge, False
                self._place(submitted, continued(submitted.request, sequences))

    def _unfinished_on(self, link: EngineLink) -> list[tuple[Submitted, list[Tracked]]]:
        """The requests of an engine, with their unfinished sequences."""
        found: dict[int, tuple[Submitted, list[Tracked]]] = {}
        for tracked in self._tracked.values():
            if tracked.submitted.link is link:
                found.setdefault(id(tracked.submitted), (tracked.submitted, []))[1].append(tracked)
        return list(found.values())

    def _fail(self, request_ids: Iterable[str], message: str) -> None:
        failure = RequestFailure("internal", message)
        error = FinishReason.ERROR
        self._deliver([RequestDelta(each, [], finish_reason=error, failure=failure) for each in request_ids])

    def _forget(self, request_id: str) -> None:
        submitted = self._tracked.pop(request_id).submitted
        self._paused.pop(request_id, None)
        submitted.num_unfinished -= 1
        submitted.link.remove(submitted.request, 1, is_last=not submitted.num_unfinished)
        self._selector.on_load(submitted.link)
        if not submitted.num_unfinished and self._trials.get(submitted.link.number) is submitted:
            self._deserted.add(submitted.link.number)
            self._end_trial(submitted.link)

    def _retry(self, tracked: Tracked, failure: RequestFailure) -> bool:
        """Sends a sequence again, once. Its engine has forgotten it, and what it computed. False if it was retried."""
        if tracked.is_retried or not tracked.submitted.link.engine.is_ready:
            return False
        tracked.is_retried = True
        logger.warning("request %s is tried again: %s", tracked.start.request_id, failure.message)
        self._send(tracked.submitted, continued(tracked.submitted.request, [tracked]))
        return True

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        """Delivers each delta to its sequence. Sequences end here alone. The loop runs once per token.

        A callback may abort any sequence, those of later deltas included: when a request of n sequences fails, the
        callback of the first aborts the others.
        """
        find = self._tracked.get
        for delta in deltas:
            tracked = find(delta.request_id)
            if tracked is None:  # aborted while the delta was on its way
                continue
            tracked.delivered += delta.token_ids
            if delta.finish_reason is not None:
                if delta.failure is not None and delta.failure.may_pass and self._retry(tracked, delta.failure):
                    continue
                self._forget(delta.request_id)
            try:
                tracked.on_delta(delta)
            except Exception:  # one request's text must not stop the others' deltas
                logger.exception("request %s failed while its output was processed", delta.request_id)
                self.abort([delta.request_id])
