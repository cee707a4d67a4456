"""Profiles by torch's own profiler, one file for each rank: `--profiler-config` with the profiler `torch`.

The spans of the worker and of its backend's operations are in the profile as well, because our C++ kernels are no torch
operations.
"""

import contextlib
import time
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from quire.core.config.observability import ProfilerConfig
from quire.core.logging import get_logger
from quire.core.trace import NO_SPANS, Span
from quire.core.wire.protocol import StartProfile
from quire.core.wire.rank import Rank

logger = get_logger(__name__)

TABLE_ROWS = 100


class TorchProfile:
    """Records between `start` and `stop`, which the thread that runs the steps has to call; both are worker calls.

    It is the worker's `Spans` too: a span is a part of the recording that runs, if any.

    Attributes:
        is_running: steps are being recorded.
    """

    def __init__(self, config: ProfilerConfig, rank: Rank, device: torch.device) -> None:
        self._config = config
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._session: StartProfile | None = None
        self._profile: profile | None = None
        self._num_steps = 0
        self._path = ""

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    # -------------------------------------------------------------------------------------------------------- calls

    def start(self, payload: bytes) -> bytes:
        """Starts a recording, now or after `delay_iterations` steps. A recording in progress continues."""
        if self._session is None:
            self._session = msgspec.msgpack.decode(payload, type=StartProfile)
            self._num_steps = 0
            if not self._delay:
                self._begin()
        return b""

    def stop(self, payload: bytes) -> bytes:
        """Ends the recording, and returns the path of its file; nothing if no step was recorded."""
        self._end()
        path, self._path, self._session = self._path, "", None
        return path.encode()

    def step(self) -> None:
        """Counts a finished step."""
        if self._session is None:
            return
        self._num_steps += 1
        if self._profile is None:
            if self._num_steps == self._delay:
                self._begin()
            return
        self._profile.step()
        limit = self._config.max_iterations if self._session.max_iterations is None else self._session.max_iterations
        if limit and self._num_steps >= self._delay + limit:
            try:
                self._end()
            except (OSError, RuntimeError) as error:  # a full disk, say, which the requests of the step do not mind
                logger.error("the profile cannot be written: %s", error)

    @property
    def _delay(self) -> int:
        asked = None if self._session is None else self._session.delay_iterations
        return self._config.delay_iterations if asked is None else asked

    def _begin(self) -> None:
        config = self._config
        steps = None
        if config.wait_iterations or config.warmup_iterations:
            wait, warmup = config.wait_iterations, config.warmup_iterations
            steps = schedule(wait=wait, warmup=warmup, active=config.active_iterations, repeat=1)
        self._profile = profile(
            activities=self._activities,
            schedule=steps,
            on_trace_ready=self._write,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._profile.start()

    def _end(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def _write(self, done: profile) -> None:
        folder = Path(self._config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{self._session.prefix}_" if self._session and self._session.prefix else ""
        name = f"{prefix}{self._rank}"
        suffix = ".gz" if self._config.torch_profiler_use_gzip else ""
        self._path = str(folder / f"{name}.{time.time_ns()}.pt.trace.json{suffix}")
        done.export_chrome_trace(self._path)
        logger.info("profile written to %s", self._path)
        if self._config.torch_profiler_dump_cuda_time_total:
            self._write_table(done, folder / f"profiler_out_{name}.txt")

    def _write_table(self, done: profile, path: Path) -> None:
        by = "self_cuda_time_total" if ProfilerActivity.CUDA in self._activities else "self_cpu_time_total"
        try:
            averages = done.key_averages()
        except UnicodeDecodeError as error:  # with stacks, torch gives some names of Python's frames as broken bytes
            logger.warning(
                "the table of operations is left out; torch_profiler_with_stack=false avoids this: %s", error
            )
            return
        path.write_text(averages.table(sort_by=by, row_limit=TABLE_ROWS), encoding="utf-8")

    # -------------------------------------------------------------------------------------------------------- spans

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return NO_SPANS.span(name) if self._profile is None else record_function(name)

    def add(self, name: str, begin: float, end: float) -> None:
        """Does nothing: work that is over cannot be added to a profile."""

    def drain(self) -> list[Span]:
        """Returns nothing: the spans are in the profile."""
        return []
