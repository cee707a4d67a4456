"""`--profile`: records a timeline of engine and workers under a benchmark's load, and prints its path."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError, QuireError
from quire.frontend.llm import LLM

START_WITH = '--profiler-config {"profiler": "timeline", "torch_profiler_dir": "DIR"}'


def add_profile_argument(group: Any, what: str) -> None:
    """Adds vLLM's flag `--profile`; its help says that `what` is recorded."""
    group.add_argument("--profile", action="store_true", help=f"Record a timeline of {what}; needs --profiler-config.")


def check_profiler(args: EngineArgs) -> None:
    """Raises ConfigError if an engine with these options has no profiler, before the engine is started."""
    profiler = args.observability.profiler_config
    if profiler is None or profiler.profiler is None:
        raise ConfigError(f"--profile records nothing without a profiler: add {START_WITH}.")


@contextlib.contextmanager
def engine_recording(llm: LLM, active: bool) -> Iterator[None]:
    """Records the `with` block, if `active`."""
    if not active:
        yield
        return
    llm.start_profile()
    yield
    _print_profile(llm.stop_profile())


@contextlib.asynccontextmanager
async def server_recording(base_url: str, headers: dict[str, str], active: bool) -> AsyncIterator[None]:
    """Makes a server record the `with` block, if `active`.

    Raises:
        ConfigError: the server has no profiler.
        QuireError: the server could not write the timeline.
    """
    if not active:
        yield
        return
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None) as client:
        response = await client.post("/start_profile")
        if response.status_code in (404, 405):
            raise ConfigError(f"--profile: the server at {base_url} records nothing; start it with {START_WITH}.")
        _check(response)
        try:
            yield
        finally:
            _print_profile(_check(await client.post("/stop_profile")))


def _check(response: httpx.Response) -> str | None:
    """The path of the timeline; None if the server does not report it. Raises QuireError if the server failed."""
    if response.status_code != 200:
        raise QuireError(f"{response.url} answered {response.status_code}: {response.text[:200]}")
    return msgspec.json.decode(response.content).get("path") if response.content else None


def _print_profile(path: str | None) -> None:
    where = path or "the folder of the server's --profiler-config"
    print(f"The timeline is in {where}; https://ui.perfetto.dev shows it.")
