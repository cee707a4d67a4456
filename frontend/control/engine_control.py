"""The engines and their control: start and end, health, profiles, calls to workers, and metrics."""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from quire.core.config.resolved import EngineConfig
from quire.core.engine.client import EngineClient
from quire.core.engine.fleet_status import FleetStatus
from quire.core.errors import ConfigError, EngineDeadError
from quire.core.wire.protocol import EngineReady
from quire.frontend.control.profilers import profiler_of
from quire.frontend.control.worker_calls import WorkerCalls
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.metrics.reader import Metric, read_metrics
from quire.frontend.metrics.stats_log import StatsLog
from quire.frontend.requests.context_limit import ContextLimit


class EngineControl:
    """An engine without its requests, which `AsyncLLM` adds. The engine starts with the first use, or with `start`.

    Args:
        limit: gets the context's length, which is final when the engine has started.
        metrics: counts requests; None counts nothing.
    """

    def __init__(
        self, config: EngineConfig, client: EngineClient, limit: ContextLimit, metrics: Metrics | None
    ) -> None:
        self.config = config
        self.client = client
        self.limit = limit
        self.metrics = metrics
        self._profiler = profiler_of(config, client)
        self._worker_calls = WorkerCalls(client, allowed=config.allow_insecure_serialization)
        self._ready: EngineReady | None = None
        self._stats_log: StatsLog | None = None
        if metrics is not None and metrics.counts_engines:
            self._stats_log = StatsLog(metrics.engines, aggregate=config.aggregate_engine_logging)
        self._logging_stats: asyncio.Task[None] | None = None
        self._end_at_exit = weakref.finalize(self, client.kill)

    # ----------------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> EngineReady:
        """Starts the engine and waits until it is ready; later calls return at once.

        Raises:
            ModelLoadError: the checkpoint cannot be read or does not fit.
            EngineDeadError: the engine cannot start.
        """
        if self._ready is None:
            self._ready = await self.client.start()
            self.limit.max_model_len = self._ready.max_model_len
            if self._stats_log is not None and self._logging_stats is None:
                self._logging_stats = asyncio.create_task(self._stats_log.run())
        return self._ready

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine is dead and will not be restarted."""
        self.client.check_health()

    def engine_status(self) -> FleetStatus:
        """The state of the engines, and the time since their last messages."""
        return self.client.status()

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error of an engine that is dead and will not be restarted; None for any other engine."""
        try:
            self.client.check_health()
        except EngineDeadError as error:
            return error
        return None

    @property
    def errored(self) -> bool:
        """True when the engine is dead and will not be restarted."""
        return self.dead_error is not None

    @property
    def is_stopped(self) -> bool:
        """The same as `errored`."""
        return self.errored

    @property
    def is_running(self) -> bool:
        """True while requests are accepted. The first one starts the engine."""
        return not self.errored

    async def aclose(self) -> None:
        """Ends the engine, in order."""
        if self._logging_stats is not None:
            self._logging_stats.cancel()
        await self.client.close()
        self._end_at_exit.detach()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine by force, for any `timeout`, and returns when its memory is free; for use outside an event
        loop."""
        self._end_at_exit()

    # ------------------------------------------------------------------------------------------------------ control

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Evicts the pages that no request uses from the prefix cache. Returns True if no page is left in it.

        Args:
            reset_running_requests: evict the pages of running requests too; they are computed again and go on.
            reset_connector: also clear caches of other engines, of which there are none.
        """
        return await self.client.reset_prefix_cache(preempt_running=reset_running_requests)

    @property
    def profiles(self) -> bool:
        """True if `profiler_config` names a profiler."""
        return self.config.trace_folder is not None or self.config.torch_profile is not None

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts the profiler that `profiler_config` names.

        Args:
            profile_prefix: prefix of the file names of torch's profiler.
            delay_iterations, max_iterations: replace those of `profiler_config` for this profile.
        """
        await self.start()
        await self._profiler.start(profile_prefix, delay_iterations, max_iterations)

    async def stop_profile(self) -> str | None:
        """Ends the profile and writes it, as Chrome traces, into `torch_profiler_dir`.

        Returns:
            The path of the file, of the first worker's if each writes one; None if no step was recorded.
        """
        await self.start()
        return await self._profiler.stop()

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's name
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method or function on every worker between two steps, and returns the results by rank.

        Args:
            method: a name of a method of `quire.executor.worker.Worker`, or a function that gets the worker first.
            timeout: seconds; None waits for ever.

        Raises:
            ConfigError: the engine runs without `allow_insecure_serialization`.
            EngineError: the method failed on a worker; the error names it.
            TimeoutError: the workers have not answered in time. They go on.
        """
        return await self._worker_calls.call(method, timeout, args, kwargs or {})

    async def do_log_stats(self) -> None:
        """Logs a line of statistics now, unless the engine has been idle, or `disable_log_stats` is set."""
        if self._stats_log is not None:
            self._stats_log.log()

    # -------------------------------------------------------------------------------------------------------- facts

    def get_metrics(self) -> list[Metric]:
        """The metrics at this moment, by vLLM's names.

        Raises:
            ConfigError: nothing is counted, because of `disable_log_stats`.
        """
        if self.metrics is None:
            raise ConfigError("Nothing is counted with disable_log_stats; start with disable_log_stats=False.")
        return read_metrics(self.metrics.collect())

    async def is_tracing_enabled(self) -> bool:
        """Returns False: Quire sends no traces."""
        return False

    @property
    def ready(self) -> EngineReady | None:
        """The engine's report of its start, such as its number of pages; None before it has started."""
        return self._ready

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together; final when the engine has started."""
        return self.limit.max_model_len
