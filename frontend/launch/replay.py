"""Runs a recorded schedule again, in an engine process of its own: a frontend never imports the workers."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quire.core.config.resolved import EngineConfig
from quire.core.engine.replay import ReplayReport
from quire.core.errors import ConfigError, QuireError
from quire.core.flight.recording import Recording
from quire.frontend.launch.engine_main import EngineStart, ReplayStart


def replay(recording: Recording, config: EngineConfig, vocabularies: Mapping[str, bytes]) -> ReplayReport:
    """Runs the plans of a recording on workers that `config` describes.

    Args:
        vocabularies: the contents of the grammars' vocabularies, by their paths in the recording.

    Raises:
        ConfigError: the weights cannot be loaded.
        QuireError: the process has ended without a report.
    """
    with contextlib.ExitStack() as here:
        paths = {}
        for path, content in vocabularies.items():
            descriptor = os.memfd_create("quire-vocabulary")
            here.callback(os.close, descriptor)
            os.write(descriptor, content)
            paths[path] = f"/proc/{os.getpid()}/fd/{descriptor}"
        start = EngineStart(
            config, "", None, os.getpid(), replay=ReplayStart([str(path) for path in recording.files], paths)
        )
        file = here.enter_context(open(os.memfd_create("quire-engine"), "wb", buffering=0))
        file.write(msgspec.msgpack.encode(start))
        done = subprocess.run(
            [sys.executable, "-P", "-m", "quire.frontend.launch.engine_main", str(file.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        )
    if not done.stdout:
        raise QuireError(f"the replay's process ended with code {done.returncode}; its messages say why.")
    answer = msgspec.msgpack.decode(done.stdout, type=ReplayReport | str)
    if isinstance(answer, str):
        raise ConfigError(answer)
    report: ReplayReport = answer
    return report


def config_of(recording: Recording, model: str | None) -> EngineConfig:
    """The configuration of the recording engine, for this machine.

    Args:
        model: the checkpoint's folder, if it is another one now.

    Raises:
        ConfigError: the engine's workers were on several hosts, or the checkpoint is gone.
    """
    config = recording.preamble.config
    if config.layout.nodes > 1:
        raise ConfigError("The engine's workers were on several hosts; a replay runs on one.")
    folder = Path(model or config.spec.path)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r} with the weights; name another with --model.")
    spec = msgspec.structs.replace(config.spec, path=str(folder.absolute()))
    ready = recording.preamble.ready
    return msgspec.structs.replace(
        config,
        spec=spec,
        flight_recorder="off",
        max_model_len=ready.max_model_len,
        fit_max_model_len=False,
        cache=msgspec.structs.replace(config.cache, num_gpu_blocks_override=ready.num_pages),
    )
