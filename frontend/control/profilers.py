"""The profilers of an engine, one for each kind of `profiler_config`."""

from typing import NoReturn, Protocol

import msgspec

from quire.core.config.resolved import EngineConfig
from quire.core.engine.client import EngineClient
from quire.core.errors import ConfigError, ParameterError
from quire.core.logging import get_logger
from quire.core.wire.protocol import START_PROFILE, STOP_PROFILE, StartProfile
from quire.frontend.refusals.arguments import refuse

logger = get_logger(__name__)


class Profiler(Protocol):
    """Records what an engine and its workers do."""

    async def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Starts a profile.

        Args:
            prefix: prefix of the file names.
            delay_iterations: steps before the profile begins.
            max_iterations: steps until the profile ends by itself.

        Raises:
            ParameterError: an argument is wrong, or has no effect with this profiler.
            ConfigError: there is no profiler.
        """

    async def stop(self) -> str | None:
        """Ends the profile, and returns the path of its file; None if no step was recorded."""


def profiler_of(config: EngineConfig, client: EngineClient) -> Profiler:
    """The profiler that an engine's options name."""
    if config.torch_profile is not None:
        return TorchProfiler(client)
    return Timeline(client) if config.trace_folder is not None else NoProfiler()


class TorchProfiler:
    """torch's own profiler: each worker writes a file."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        try:
            session = msgspec.convert((prefix, delay_iterations, max_iterations), StartProfile)
        except msgspec.ValidationError as error:
            raise ParameterError(f"profile_prefix, delay_iterations, max_iterations: {error}.") from None
        await self._client.call_workers(START_PROFILE, msgspec.msgpack.encode(session))

    async def stop(self) -> str | None:
        first, *_ = await self._client.call_workers(STOP_PROFILE)
        return first.decode() or None


class Timeline:
    """Quire's own timeline of engine and workers, in one file."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        refuse(profile_prefix=prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)
        await self._client.profile(True)

    async def stop(self) -> str | None:
        path = await self._client.profile(False)
        logger.info("timeline written to %s", path)
        return path


class NoProfiler:
    """Raises an error that names the option, when no profiler is configured."""

    async def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        refuse(profile_prefix=prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)
        self._explain()

    async def stop(self) -> str | None:
        self._explain()

    def _explain(self) -> NoReturn:
        raise ConfigError(
            "Nothing is recorded without a profiler: start with "
            '--profiler-config {"profiler": "torch", "torch_profiler_dir": "DIR"}.'
        )
