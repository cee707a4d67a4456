"""Prepares an engine's launch: finds the checkpoint and resolves every option, but starts nothing."""

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.logging import get_logger, level
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.launch.layout import divide_engines, engine_places, remote_places
from quire.frontend.launch.nodes import coordinator_starts, engines_coordinator_start, shared_epochs
from quire.frontend.launch.options import UsageContext, resolve
from quire.frontend.launch.ray_nodes import RayNodes
from quire.frontend.launch.remote_engines import RemoteLauncher, RemoteNodes
from quire.frontend.launch.speculation import follow_draft, read_draft
from quire.frontend.refusals import environment

logger = get_logger(__name__)


@dataclass(frozen=True)
class EngineSetup:
    """A user's options, resolved: all that an engine's launch needs, and no more."""

    args: EngineArgs
    folder: Path
    tokenizer_folder: Path
    config: EngineConfig
    launchers: list[EngineLauncher | RemoteLauncher]

    @classmethod
    def from_args(cls, args: EngineArgs, usage: UsageContext) -> "EngineSetup":
        """Finds the checkpoint and resolves every option. Starts nothing.

        Raises:
            ConfigError: an option, an environment variable or the checkpoint is wrong.
        """
        _check_environment()
        args = replace(args, parallel=divide_engines(args.parallel))
        folder = model_source.find_model(args.model, args.load)
        args, folder = follow_draft(args, folder)
        tokenizer_folder = model_source.find_tokenizer(args.model, args.load, folder)
        spec = model_source.read_model_spec(folder, args.model, tokenizer_folder)
        config = resolve(args, spec, usage, draft=read_draft(args, spec))
        clusters, transport = coordinator_starts(args.parallel, folder), args.parallel.engine_transport
        num_workers, kind = config.layout.num_workers, config.device
        ray_nodes = RayNodes.with_workers(args, num_workers=num_workers, device=kind)
        ray_engines = RayNodes.with_engines(args, num_workers=num_workers, device=kind)
        others = remote_places(args.parallel)
        nodes = RemoteNodes(engines_coordinator_start(args.parallel, folder), ray_engines) if others else None
        epochs = shared_epochs(args, config, folder, nodes)
        launchers: list[EngineLauncher | RemoteLauncher] = [
            EngineLauncher(replace(config, place=place), transport, cluster=cluster, ray_nodes=ray_nodes, epochs=epochs)
            for place, cluster in zip(engine_places(args.parallel), clusters, strict=True)
        ]
        if nodes is not None:
            launchers += [RemoteLauncher(replace(config, place=place), nodes, epochs) for place in others]
            launchers.sort(key=lambda launcher: launcher.config.place.data)
        elif args.parallel.data_parallel_address is not None and (epochs is None or not epochs.has_other_hosts):
            logger.info("--data-parallel-address has no effect: this server uses no engines of other hosts")
        return cls(args, folder, tokenizer_folder, config, launchers)

    def restarts(self) -> RestartPolicy:
        """The rules for the restarts of one engine."""
        asked = self.args.recovery
        return RestartPolicy(
            max_restarts=asked.max_restarts,
            window_seconds=asked.restart_window,
            lost_weights_seconds=envs.read_float("LOST_WEIGHTS_TIMEOUT_S"),
        )

    def launch_ahead(self) -> None:
        """Starts the engines now, so that they load while the frontend starts."""
        for launcher in self.launchers:
            launcher.launch_ahead()

    def close(self) -> None:
        """Ends engines that were launched and never used, and removes what the launchers made on disk."""
        for launcher in self.launchers:
            launcher.close()


def _check_environment() -> None:
    envs.check()
    level()
    if names := environment.unread():
        logger.warning("nothing reads these environment variables: %s", ", ".join(names))
