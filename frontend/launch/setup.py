"""Prepares an engine's launch: finds the checkpoint and resolves every option, but starts nothing."""

from dataclasses import dataclass
from pathlib import Path

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.logging import get_logger, level
from quire.frontend.checkpoint import model_source
from quire.frontend.launch import environment
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.launch.nodes import head_start
from quire.frontend.launch.options import UsageContext, resolve

logger = get_logger(__name__)


@dataclass(frozen=True)
class EngineSetup:
    """A user's options, resolved: everything that an engine's launch needs, and no more."""

    args: EngineArgs
    folder: Path
    tokenizer_folder: Path
    config: EngineConfig
    launcher: EngineLauncher

    @classmethod
    def from_args(cls, args: EngineArgs, usage: UsageContext) -> "EngineSetup":
        """Finds the checkpoint and resolves every option. Starts nothing.

        Raises:
            ConfigError: an option, an environment variable or the checkpoint is wrong.
        """
        _check_environment()
        folder = model_source.find_model(args.model, args.load)
        tokenizer_folder = model_source.find_tokenizer(args.model, args.load, folder)
        config = resolve(args, model_source.read_model_spec(folder, args.model, tokenizer_folder), usage)
        cluster = head_start(args.parallel, folder)
        launcher = EngineLauncher(config, args.parallel.engine_transport, cluster=cluster)
        return cls(args, folder, tokenizer_folder, config, launcher)


def _check_environment() -> None:
    envs.check()
    level()
    if names := environment.unread():
        logger.warning("nothing reads these environment variables: %s", ", ".join(names))
