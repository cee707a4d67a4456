"""Asks a process of its own about a model that is not run: it imports torch, which a frontend never does."""

import subprocess
import sys
from pathlib import Path

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.wire.inspection import InspectionAnswer, LoadPlan, Refused, ShardsSaved
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.options import resolve


def plan_load(args: EngineArgs, device_bytes: int | None = None) -> tuple[EngineConfig, LoadPlan]:
    """The options, resolved as for a server, and how the model would be loaded. No weights are read or downloaded.

    Args:
        device_bytes: memory of a device that need not be in this machine; None: this machine's.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
    """
    folder = model_source.find_model(args.model, msgspec.structs.replace(args.load, load_format="dummy"))
    is_absent_gpu = device_bytes is not None and args.device.device == "cuda"
    spec = model_source.read_model_spec(folder, args.model)
    config = resolve(args, spec, "server", gpu_bytes=device_bytes if is_absent_gpu else None)
    answer = _ask(config, "plan", *([] if device_bytes is None else [str(device_bytes)]))
    assert isinstance(answer, LoadPlan)
    return config, answer


def save_shards(args: EngineArgs, folder: Path) -> ShardsSaved:
    """Writes the checkpoint to `folder` as each rank would read it.

    Raises:
        ConfigError: an option or the checkpoint is wrong, or the folder is not empty.
    """
    source = model_source.find_model(args.model, args.load)
    config = resolve(args, model_source.read_model_spec(source, args.model), "server")
    answer = _ask(config, "save-shards", str(folder))
    assert isinstance(answer, ShardsSaved)
    return answer


def _ask(config: EngineConfig, *question: str) -> InspectionAnswer:
    command = [sys.executable, "-P", "-m", "quire.executor.inspection.process", *question]
    done = subprocess.run(command, input=msgspec.msgpack.encode(config), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise QuireError(
            f"the process that looks at the model ended with code {done.returncode}; its messages say why."
        )
    answer = msgspec.msgpack.decode(done.stdout, type=InspectionAnswer)
    if isinstance(answer, Refused):
        raise ConfigError(answer.message)
    return answer
