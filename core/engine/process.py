"""The engine process: an actor whose inbox is a ZeroMQ socket and whose work is an `Engine`.

Each frontend sends Hello, gets EngineReady once the model is loaded, and then the deltas of its requests. The engine
notices that a frontend is gone at the next message to it, within a heartbeat, and aborts its requests. The process
exits with code 0 after a shutdown or when its parent dies, and with 1 when the engine fails.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.core import envs
from quire.core.config.resolved import EngineConfig
from quire.core.engine.engine import Engine, Executor
from quire.core.engine.file_copies import FileCopies
from quire.core.engine.gc_tuning import tune_garbage_collector
from quire.core.engine.running_engine import FREE_SECONDS
from quire.core.engine.silence import BUSY_BEAT_SECONDS, IDLE_BEAT_SECONDS
from quire.core.engine.step_times import LEAST_SECONDS, LEAST_SECONDS_OF_HOSTS, StepTimes
from quire.core.engine.step_watch import IDLE_SECONDS, SHARED_IDLE_SECONDS, StepWatch
from quire.core.engine.undecodable_requests import ids_in_unreadable
from quire.core.errors import (
    ConfigError,
    EngineError,
    EngineKilledError,
    HostLostError,
    NoMemoryError,
    PeerLostError,
    QuireError,
)
from quire.core.flight.recorder import NO_RECORDER, Recorder
from quire.core.logging import get_logger
from quire.core.processes import until_group_ended
from quire.core.scheduling.scheduler import Scheduler
from quire.core.trace import Timeline
from quire.core.wire import protocol
from quire.core.wire.channel import Channel, CurveKeys, bind_router
from quire.core.wire.request_ids import reply_id_of
from quire.core.wire.row_outputs import RequestFailure

logger = get_logger(__name__)

FAREWELL_LINGER_MS = 2000
_NO_ADAPTERS = "The engine takes no adapters; start it with --enable-lora."
GREETING_SECONDS = 30.0
"""Limit of a failed engine's wait for a first frontend to report the failure to."""


class EngineProcess:
    """Routes messages between frontends and one engine. Build it inside a running loop, then await `run`.

    Args:
        follows: the process group of the engine before, whose memory and devices this one needs.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        address: str,
        keys: CurveKeys | None,
        listen_fd: int | None = None,
        recorder: Recorder = NO_RECORDER,
        follows: int | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._decoder = msgspec.msgpack.Decoder(protocol.EngineInput)
        self._encoder = protocol.encoder()
        self._frontends: list[bytes] = []
        self._owners: dict[str, bytes] = {}  # request id -> frontend identity
        self._grammars: dict[tuple[bytes, bytes], protocol.Grammar] = {}  # by frontend identity and key
        self._files = FileCopies()
        self._ready: protocol.EngineReady | None = None
        self._scheduler: Scheduler | None = None
        self._engine: Engine | None = None
        self._recorder = recorder
        self._follows = follows
        self._timeline = Timeline(Path(config.trace_folder or ""))
        self._calls: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._greeted = asyncio.Event()
        self._sent_at = time.monotonic()
        self._channel: Channel = bind_router(address, keys, self._on_message, listen_fd=listen_fd)

    async def run(self) -> int:
        """Loads the model, and serves until `close` or a failure. Returns the process's exit code."""
        try:
            await self._until_closed(self._start_and_step)
            code = 0
        except Exception as error:  # any failure ends the process, and frontends must hear of it
            code = 1
            await self._wait_for_frontend()
            self._report(error)
        await self._executor.close(hung=self._is_hung)
        self._channel.close(linger_ms=FAREWELL_LINGER_MS)
        return code

    @property
    def _is_hung(self) -> bool:
        return self._engine is not None and self._engine.is_hung

    def close(self) -> None:
        """Makes `run` return 0."""
        self._closing.set()

    async def _until_closed(self, work: Callable) -> None:
        tasks = [asyncio.create_task(job) for job in (work(), self._beat(), self._closing.wait())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()

    async def _start_and_step(self) -> None:
        if self._follows is not None:
            await until_group_ended(self._follows, FREE_SECONDS)
        ready = await self._executor.start()
        self._scheduler = Scheduler(
            self._config.limits,
            kv_groups=ready.kv_groups,
            num_pages=ready.num_pages,
            max_model_len=ready.max_model_len,
            eos_token_ids=self._config.spec.eos_token_ids,
            num_stages=self._config.layout.pipeline,
            num_token_types=self._config.spec.num_token_types,
            whole_prompts=ready.whole_prompts,
            media_spans=ready.media_spans,
            media_rows=ready.media_rows,
            speculation=self._config.speculation,
        )
        self._engine = Engine(
            self._scheduler,
            self._executor,
            watch=self._step_watch(),
            on_deltas=self._send_deltas,
            timeline=self._timeline,
            recorder=self._recorder,
        )
        self._recorder.start(self._config, ready)
        tune_garbage_collector()
        self._ready = ready
        for frontend in list(self._frontends):
            self._send(frontend, ready)
        await self._engine.run()

    def _step_watch(self) -> StepWatch:
        fixed = envs.read("ENGINE_ITERATION_TIMEOUT_S") is not None
        least = LEAST_SECONDS if self._config.layout.nodes == 1 else LEAST_SECONDS_OF_HOSTS
        times = StepTimes(envs.read_float("ENGINE_ITERATION_TIMEOUT_S"), fixed=fixed, least_seconds=least)
        return StepWatch(
            times,
            lambda: self._executor.pids,
            lambda: self._executor.stopped,
            # Where engines share experts, steps of the others wait for these workers.
            idle_seconds=SHARED_IDLE_SECONDS if self._config.layout.shares_experts else IDLE_SECONDS,
        )

    # ------------------------------------------------------------------------------------------------------ inbox

    def _on_message(self, frames: list[bytes]) -> None:
        frontend, *said = frames
        try:
            [payload] = said
            message = self._decoder.decode(payload)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            logger.error("dropping a message that cannot be decoded: %s", error)
            if frontend in self._frontends:
                unread = [request_id for each in said for request_id in ids_in_unreadable(each)]
                self._fail(frontend, unread, f"The engine could not read this request: {error}")
            return
        if frontend not in self._frontends and not isinstance(message, protocol.Hello | protocol.Shutdown):
            return  # the frontend is gone, and no answer could reach it
        match message:
            case protocol.EngineRequest():
                self._recorder.add_input(payload)
                self._add_or_fail(frontend, message)
            case protocol.LentFile():
                self._files.add(frontend, message)
            case protocol.DropGrammars():
                for key in message.keys:
                    self._grammars.pop((frontend, key), None)  # the message that brought it may not have been read
            case protocol.AbortRequests():
                self._recorder.add_input(payload)
                self._abort(message.request_ids)
            case protocol.AbortReplies():
                self._recorder.add_input(payload)
                self._abort_replies(message)
            case protocol.Hello():
                self._send_heartbeats()  # one that came back may bring requests that its former self left here
                self._frontends.append(frontend)
                self._greeted.set()
                if self._ready is not None:
                    self._send(frontend, self._ready)
            case protocol.ResetPrefixCache():
                self._send(frontend, self._reset_prefix_cache(message.preempt_running))
            case protocol.Profile():
                self._send(frontend, self._profile(message.active))
            case protocol.CallWorkers():
                task = asyncio.create_task(self._call_workers(frontend, message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case protocol.PrepareAdapter():
                task = asyncio.create_task(self._prepare_adapter(frontend, message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case protocol.Shutdown():
                self.close()

    def _add_or_fail(self, frontend: bytes, request: protocol.EngineRequest) -> None:
        try:
            self._add(frontend, request)
        except Exception as error:  # whatever it is, somebody waits for the request
            request_ids = [start.request_id for start in request.sequences]
            logger.exception("a request cannot be taken, so it fails: %s", ", ".join(request_ids[:1]))
            self._abort([request_id for request_id in request_ids if request_id not in self._owners])
            reason = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._fail(frontend, request_ids, f"The engine could not take this request: {reason}")

    def _fail(self, frontend: bytes, request_ids: list[str], message: str) -> None:
        """Fails sequences that the scheduler does not have."""
        if not request_ids:
            return
        failure, stats = RequestFailure("internal", message), protocol.SchedulerStats()
        if self._scheduler is not None:
            stats = self._scheduler.stats()
        error = protocol.FinishReason.ERROR
        deltas = [protocol.RequestDelta(each, [], finish_reason=error, failure=failure) for each in request_ids]
        self._send(frontend, self._outputs(deltas, stats))

    def _add(self, frontend: bytes, request: protocol.EngineRequest) -> None:
        assert self._scheduler is not None, "a frontend sends requests only after EngineReady"
        assert self._engine is not None
        refused = self._scheduler.add(self._with_grammar(frontend, request))
        if refused:
            self._send(frontend, self._outputs(refused, self._scheduler.stats()))
        accepted = {start.request_id for start in request.sequences}.difference(delta.request_id for delta in refused)
        self._owners.update(dict.fromkeys(accepted, frontend))
        # Plan only when this inbox is drained, so that requests that came together share a step.
        asyncio.get_running_loop().call_soon(self._engine.fill)

    def _with_grammar(self, frontend: bytes, request: protocol.EngineRequest) -> protocol.EngineRequest:
        """The request with its whole grammar. The frontend sends a grammar's data and vocabulary once."""
        if request.grammar is None:
            return request
        place = frontend, request.grammar.key
        if request.grammar.data:
            path = self._files.path_here(frontend, request.grammar.vocabulary_path)
            self._grammars[place] = msgspec.structs.replace(request.grammar, vocabulary_path=path)
        if place not in self._grammars:
            raise EngineError("the message with its grammar could not be read; send it again.")
        return msgspec.structs.replace(request, grammar=self._grammars[place])

    def _abort(self, request_ids: list[str]) -> None:
        if self._scheduler is None:
            return
        for request_id in request_ids:
            self._owners.pop(request_id, None)
        self._scheduler.abort(request_ids)

    def _abort_replies(self, asked: protocol.AbortReplies) -> None:
        """Ends a tenant's requests of any frontend, which gets their last deltas."""
        assert self._scheduler is not None, "a frontend asks only after EngineReady"
        wanted = set(asked.reply_ids)
        found = [each for each in self._owners if reply_id_of(each) in wanted]
        deltas = self._scheduler.abort([each for each in found if self._scheduler.tenant_of(each) == asked.tenant])
        if deltas:
            self._send_deltas(deltas)

    def _reset_prefix_cache(self, preempt_running: bool) -> protocol.PrefixCacheReset:
        assert self._scheduler is not None, "a frontend asks only after EngineReady"
        assert self._engine is not None
        is_empty = self._scheduler.reset_prefix_cache(preempt_running=preempt_running)
        asyncio.get_running_loop().call_soon(self._engine.fill)  # preempted requests may be all that there is to plan
        return protocol.PrefixCacheReset(is_empty)

    def _profile(self, active: bool) -> protocol.Profiled:
        if active:
            self._timeline.start()
            return protocol.Profiled()
        try:
            return protocol.Profiled(str(self._timeline.stop()))
        except OSError as error:
            return protocol.Profiled(error=f"The timeline cannot be written: {error}.")

    async def _call_workers(self, frontend: bytes, call: protocol.CallWorkers) -> None:
        try:
            answer = protocol.WorkersAnswered(call.call_id, await self._executor.call(call.name, call.payload))
        except EngineError as error:
            answer = protocol.WorkersAnswered(call.call_id, [], error=str(error))
        self._send(frontend, answer)

    async def _prepare_adapter(self, frontend: bytes, wanted: protocol.PrepareAdapter) -> None:
        assert self._engine is not None, "a frontend asks only after EngineReady"
        failure: RequestFailure | None = RequestFailure("invalid", _NO_ADAPTERS)
        try:
            if self._config.limits.max_adapters:
                failure = await self._engine.adapters.prepare(wanted.adapter)
            results = [] if failure is None else [msgspec.msgpack.encode(failure)]
            answer = protocol.WorkersAnswered(wanted.call_id, results)
        except EngineError as error:
            answer = protocol.WorkersAnswered(wanted.call_id, [], error=str(error))
        self._send(frontend, answer)

    # ----------------------------------------------------------------------------------------------------- outbox

    def _send_deltas(self, deltas: list[protocol.RequestDelta]) -> None:
        assert self._scheduler is not None
        stats = self._scheduler.stats()
        by_owner: defaultdict[bytes, list[protocol.RequestDelta]] = defaultdict(list)
        for delta in deltas:
            owner = self._owners.get(delta.request_id)
            if owner is None:  # aborted while its last step ran
                continue
            by_owner[owner].append(delta)
            if delta.finish_reason is not None:
                del self._owners[delta.request_id]
        for frontend in list(self._frontends):
            self._send(frontend, self._outputs(by_owner[frontend], stats))

    def _outputs(self, deltas: list[protocol.RequestDelta], stats: protocol.SchedulerStats) -> protocol.StepOutputs:
        return protocol.StepOutputs(deltas, stats, time.monotonic())

    def _send(self, frontend: bytes, message: protocol.EngineOutput) -> None:
        self._sent_at = time.monotonic()
        if not self._channel.send([frontend, self._encoder.encode(message)]):
            self._forget(frontend)

    def _forget(self, frontend: bytes) -> None:
        """Aborts the requests of a frontend that is gone, and drops its grammars and files."""
        if frontend not in self._frontends:
            return
        self._frontends.remove(frontend)
        mine = [request_id for request_id, owner in self._owners.items() if owner == frontend]
        if mine:
            logger.warning("a frontend is gone: aborting its requests: %d", len(mine))
        for place in [place for place in self._grammars if place[0] == frontend]:
            del self._grammars[place]
        self._files.forget(frontend)
        self._abort(mine)

    def _send_heartbeats(self) -> None:
        stats = self._scheduler.stats() if self._scheduler is not None else protocol.SchedulerStats()
        for frontend in list(self._frontends):
            self._send(frontend, protocol.Heartbeat(stats, self._executor.waits_for))

    async def _beat(self) -> None:
        """Sends heartbeats, which show that this event loop is alive even while the workers are busy."""
        while True:
            is_busy = self._scheduler is not None and self._scheduler.num_in_flight > 0
            interval = BUSY_BEAT_SECONDS if is_busy else IDLE_BEAT_SECONDS
            if time.monotonic() - self._sent_at >= interval:
                self._send_heartbeats()
            await asyncio.sleep(BUSY_BEAT_SECONDS)

    async def _wait_for_frontend(self) -> None:
        """Waits for a frontend to report a failure to: the one that launched this engine may still be starting."""
        waits = [asyncio.create_task(event.wait()) for event in (self._greeted, self._closing)]
        await asyncio.wait(waits, timeout=GREETING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _report(self, error: Exception) -> None:
        if not isinstance(error, QuireError):
            logger.exception("the engine failed")
        elif self._config.is_led_from_afar or not self._frontends:  # else a frontend logs it, once
            logger.error("%s", error)
        text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        self._recorder.add_fault(text)
        failed = protocol.EngineFailed(text, _cause_of(error), self._is_hung or self._config.layout.nodes > 1)
        for frontend in list(self._frontends):
            self._send(frontend, failed)


def _cause_of(error: Exception) -> protocol.FailureCause:
    match error:
        case NoMemoryError():
            return "memory"
        case ConfigError():
            return "setting"
        case PeerLostError():
            return "peer"
        case HostLostError():
            return "host"
        case EngineKilledError():
            return "killed"
    return "other"
