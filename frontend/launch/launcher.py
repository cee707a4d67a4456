"""Where the parts meet: options are resolved here, once, and engine processes start here.

The only frontend module that imports the executor, and only inside the engine process: `python -m
quire.frontend.launch` is that process's main.
"""

import asyncio
import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import uvloop
from msgspec import Struct

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.observability import ProfilerConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.engine.channel import CurveKeys
from quire.core.errors import ConfigError
from quire.core.logging import configure, get_logger, level
from quire.frontend.checkpoint import model_source
from quire.frontend.launch import device

logger = get_logger(__name__)

Usage = Literal["llm", "server"]
DEFAULT_BLOCK_SIZE = 16
LARGE_GPU_BYTES = 70 * 2**30

# ---------------------------------------------------------------------------------------------------- resolution


def resolve(args: EngineArgs, spec: ModelSpec, usage: Usage) -> EngineConfig:
    """Fills every default in.

    Raises:
        ConfigError: options that contradict each other or the checkpoint.
    """
    kind = device.choose(args.device.device)
    world_size = args.parallel.tensor_parallel_size
    executor = args.parallel.distributed_executor_backend or ("uni" if world_size == 1 else "mp")
    if executor == "uni" and world_size > 1:
        raise ConfigError("--distributed-executor-backend uni runs one worker; use mp with --tensor-parallel-size > 1.")
    max_model_len, fit = _max_model_len(args.model.max_model_len, spec)
    return EngineConfig(
        spec=spec,
        limits=_limits(args, usage, kind, world_size, max_model_len),
        load=args.load,
        cache=args.cache,
        device=kind,
        tensor_parallel_size=world_size,
        executor=executor,
        max_model_len=max_model_len,
        fit_max_model_len=fit,
        seed=args.model.seed,
        log_stats=not args.observability.disable_log_stats,
        logprobs_mode=args.model.logprobs_mode,
        logits_processors=args.model.logits_processors or [],
        trace_folder=_trace_folder(args.observability.profiler_config),
        # Offline work begins at once with as many requests as there are; a server should answer its first one soon.
        first_touch_seconds=4.0 if usage == "llm" else 1.0,
    )


def _trace_folder(profiler: ProfilerConfig | None) -> str | None:
    return None if profiler is None or profiler.profiler is None else os.path.abspath(profiler.torch_profiler_dir)


def _max_model_len(asked: int | None, spec: ModelSpec) -> tuple[int, bool]:
    """(limit in tokens, whether the memory plan may lower it)."""
    if asked is None or asked == -1:
        return spec.max_position_embeddings, asked == -1
    if asked > spec.max_position_embeddings and not envs.read_flag("ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigError(
            f"--max-model-len {asked} exceeds the checkpoint's own limit of {spec.max_position_embeddings} tokens. "
            "Lower it, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if the model is known to extrapolate."
        )
    if asked < 1:
        raise ConfigError(f"--max-model-len must be at least 1, or -1 for what fits in memory; got {asked}.")
    return asked, False


def _limits(args: EngineArgs, usage: Usage, kind: str, world_size: int, max_model_len: int) -> SchedulerLimits:
    asked = args.scheduler
    default_tokens, default_seqs = _batch_defaults(usage, kind, world_size)
    chunked = asked.enable_chunked_prefill is not False
    max_num_seqs = asked.max_num_seqs or default_seqs
    tokens = asked.max_num_batched_tokens
    if tokens is None:
        tokens = default_tokens if chunked else max(default_tokens, max_model_len)
        tokens = max(1, min(tokens, max_num_seqs * max_model_len))
    if asked.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, tokens)
    if not chunked and tokens < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is below the model length {max_model_len}, so a long prompt could "
            "never run whole: raise it, lower --max-model-len, or leave chunked prefill on."
        )
    if not chunked and asked.long_prefill_token_threshold:
        raise ConfigError("--long-prefill-token-threshold splits prompts, which --no-enable-chunked-prefill forbids.")
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_num_queued_reqs=asked.max_num_queued_reqs,
        long_prefill_token_threshold=asked.long_prefill_token_threshold,
        policy=asked.scheduling_policy,
        enable_chunked_prefill=chunked,
        async_scheduling=asked.async_scheduling is not False,
        block_size=args.cache.block_size or DEFAULT_BLOCK_SIZE,
        enable_prefix_caching=args.cache.enable_prefix_caching is not False,
    )


def _batch_defaults(usage: Usage, kind: str, world_size: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that vLLM would choose for this device and entry point.

    But a CPU's server takes a quarter of vLLM's 2048 tokens: running streams wait for a step with prompts in it, and a
    CPU is as fast on 512 tokens as on more.
    """
    if kind == "cpu":
        tokens, seqs = (4096, 256) if usage == "llm" else (512, 128)
        return tokens * world_size, seqs * world_size
    if device.gpu_memory_bytes() >= LARGE_GPU_BYTES:
        return (16384 if usage == "llm" else 8192), 1024
    return (8192 if usage == "llm" else 2048), 256


# ------------------------------------------------------------------------------------------------ engine processes


class EngineStart(Struct, array_like=True):
    """What an engine process reads from its standard input, before anything else."""

    config: EngineConfig
    address: str
    keys: CurveKeys | None
    worker_factory: str | None = None  # qualified name of another worker than the real one


class EngineSubprocess:
    """A running engine process, seen from its parent."""

    def __init__(self, process: subprocess.Popen, address: str, keys: CurveKeys | None) -> None:
        self._process = process
        self.address = address
        self.keys = keys
        self.pid = process.pid
        self._is_over = False

    async def wait(self) -> int:
        """The exit code; negative is the signal that ended it."""
        if (code := self._process.poll()) is not None:
            return code
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def kill(self) -> None:
        """Ends the engine and, through its process group, its workers; once, as the system gives ids away again."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class EngineLauncher:
    """Starts engine processes, each at an address of its own inside a private folder (or on loopback TCP).

    Args:
        worker_factory: qualified name of what builds the workers, for benchmarks of everything but the model.
    """

    def __init__(
        self, config: EngineConfig, transport: Literal["ipc", "tcp"] = "ipc", *, worker_factory: str | None = None
    ) -> None:
        self._config = config
        self._transport = transport
        self._worker_factory = worker_factory
        self.folder: str | None = None  # holds the sockets; mode 0700
        self._launched = 0
        self._ahead: EngineSubprocess | None = None

    def launch_ahead(self) -> None:
        """Starts the engine that the first `launch` hands out: it loads while its frontend has other things to do."""
        self._ahead = self._start()

    def launch(self) -> EngineSubprocess:
        """Starts an engine. It dies when this process does: its standard input closes."""
        ahead, self._ahead = self._ahead, None
        return ahead or self._start()

    def _start(self) -> EngineSubprocess:
        keys = CurveKeys.generate() if self._transport == "tcp" else None
        address = self._next_address()
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "quire.frontend.launch.launcher",
            ],  # -P: no module of the user's folder shadows ours
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which shuts the engine down in order
        )
        assert process.stdin is not None
        start = msgspec.msgpack.encode(EngineStart(self._config, address, keys, self._worker_factory))
        with contextlib.suppress(BrokenPipeError):  # it died at once: `wait` tells
            process.stdin.write(len(start).to_bytes(8, "little") + start)
            process.stdin.flush()
        return EngineSubprocess(process, address, keys)

    def close(self) -> None:
        """Ends an engine that was never handed out, and removes the private folder."""
        if self._ahead is not None:
            self._ahead.kill()
            self._ahead = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _next_address(self) -> str:
        self._launched += 1
        if self._transport == "tcp":
            return f"tcp://127.0.0.1:{_free_port()}"
        if self.folder is None:
            self.folder = _private_folder()
        return f"ipc://{self.folder}/engine-{self._launched}.sock"


def _private_folder() -> str:
    base = envs.read("RPC_BASE_PATH")
    try:
        return tempfile.mkdtemp(prefix="quire-", dir=base)
    except OSError as error:
        raise ConfigError(
            f"The sockets of the engine need a folder in {base or tempfile.gettempdir()!r}, which cannot be made: "
            f"{error.strerror}. QUIRE_RPC_BASE_PATH names another place."
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class EngineSetup:
    """What a user's options came to: all that is needed to launch an engine, and no more."""

    args: EngineArgs
    folder: Path
    tokenizer_folder: Path
    config: EngineConfig
    launcher: EngineLauncher

    @classmethod
    def from_args(cls, args: EngineArgs, usage: Usage) -> "EngineSetup":
        """Finds the checkpoint and resolves every option. Starts nothing.

        Raises:
            ConfigError: an option, an environment variable or the checkpoint is wrong.
        """
        _check_environment()
        folder = model_source.find_model(args.model, args.load)
        tokenizer_folder = model_source.find_tokenizer(args.model, args.load, folder)
        config = resolve(args, model_source.read_model_spec(folder, args.model, tokenizer_folder), usage)
        return cls(args, folder, tokenizer_folder, config, EngineLauncher(config, args.parallel.engine_transport))


def _check_environment() -> None:
    envs.check()
    level()
    for name, meant in envs.misspelt():
        logger.warning("nothing reads the environment variable %s; did you mean %s?", name, meant)


def engine_main() -> None:
    """Main of an engine process."""
    gc.disable()  # until all is loaded: imports make a million objects and hardly a cycle among them
    configure("engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=EngineStart)
    code = uvloop.run(_run_engine(start))
    if start.address.startswith("ipc://") and _outlives(parent):  # it cannot tidy up any more
        shutil.rmtree(os.path.dirname(start.address.removeprefix("ipc://")), ignore_errors=True)
    sys.exit(code)


def _outlives(parent: int) -> bool:
    """Whether the parent is gone. Its end of our standard input closes a moment before it stops being our parent."""
    deadline = time.monotonic() + 1
    [is_closed, _, _] = select.select([sys.stdin], [], [], 0)
    while is_closed and os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getppid() != parent


async def _run_engine(start: EngineStart) -> int:
    from quire.core.engine.process import EngineProcess

    if start.config.executor == "uni":
        from quire.executor.processes.uniproc import UniProcExecutor as Executor
    else:
        from quire.executor.processes.multiproc import MultiProcExecutor as Executor  # type: ignore[assignment]
    options = {"factory": start.worker_factory} if start.worker_factory else {}
    executor = Executor(start.config, **options)
    process = EngineProcess(start.config, executor, start.address, start.keys)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), process.close)  # nothing more is ever written: readable means the parent died
    loop.add_signal_handler(signal.SIGTERM, process.close)
    return await process.run()


if __name__ == "__main__":
    engine_main()
