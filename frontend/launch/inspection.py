"""Asks an inspection process about a model that no engine runs. The process imports torch, which a frontend never
does."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.wire.inspection import (
    FilesSaved,
    InspectionAnswer,
    InspectionRefused,
    LoadPlan,
    Obstacles,
    OpsQuestion,
    OpsTimed,
)
from quire.core.wire.model_cost import ModelCost
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.options import resolve
from quire.frontend.launch.speculation import follow_draft, read_draft


def plan_load(args: EngineArgs, device_bytes: int | None = None) -> tuple[EngineConfig, LoadPlan]:
    """Plans how the model would be loaded, with the options resolved as for a server. Reads and downloads no weights.

    Args:
        device_bytes: memory of a device that need not be in this machine; None: this machine's.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
    """
    load = msgspec.structs.replace(args.load, load_format="dummy")
    args, folder = follow_draft(args, model_source.find_model(args.model, load))
    is_absent_gpu = device_bytes is not None and args.device.device == "cuda"
    spec = model_source.read_model_spec(folder, args.model)
    gpu_bytes = device_bytes if is_absent_gpu else None
    config = resolve(args, spec, "server", gpu_bytes=gpu_bytes, draft=read_draft(args, spec, load))
    answer = _ask(config, "plan", *([] if device_bytes is None else [str(device_bytes)]))
    assert isinstance(answer, LoadPlan)
    return config, answer


def find_obstacles(config: EngineConfig, memories: Sequence[Sequence[tuple[int, int]]]) -> list[list[str | None]]:
    """The reasons why each rank of an engine does not fit into each of its candidate devices; None where it fits.

    Args:
        memories: by rank, the total and the free bytes of devices.

    Raises:
        ConfigError: the model cannot be built.
    """
    answer = _ask(config, "fit", msgspec.json.encode(memories).decode())
    assert isinstance(answer, Obstacles)
    return answer.by_rank


def count_cost(
    args: EngineArgs, device_bytes: int | None, tensor_sizes: Sequence[int]
) -> tuple[EngineConfig, ModelCost]:
    """Counts the cost of a step of the model on a rank, with the options resolved as for a server.

    Args:
        device_bytes: memory of a GPU that need not be in this machine; None: this machine's device.
        tensor_sizes: numbers of ranks that may divide each layer.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
    """
    folder = model_source.find_model(args.model, msgspec.structs.replace(args.load, load_format="dummy"))
    config = resolve(args, model_source.read_model_spec(folder, args.model), "server", gpu_bytes=device_bytes)
    answer = _ask(config, "cost", *map(str, tensor_sizes))
    assert isinstance(answer, ModelCost)
    return config, answer


def save_shards(args: EngineArgs, folder: Path) -> FilesSaved:
    """Writes the checkpoint to `folder` as each rank would read it.

    Raises:
        ConfigError: an option or the checkpoint is wrong, or the folder is not empty.
    """
    return _save(args, "save-shards", folder)


def pack_model(args: EngineArgs, folder: Path) -> FilesSaved:
    """Writes the checkpoint's weights to `folder` as each rank's backend packs them.

    Raises:
        ConfigError: an option or the checkpoint is wrong, or the folder is not empty.
    """
    return _save(args, "pack", folder)


def _save(args: EngineArgs, question: str, folder: Path) -> FilesSaved:
    source = model_source.find_model(args.model, args.load)
    config = resolve(args, model_source.read_model_spec(source, args.model), "server")
    answer = _ask(config, question, str(folder))
    assert isinstance(answer, FilesSaved)
    return answer


def time_ops(question: OpsQuestion, isa: str | None) -> OpsTimed:
    """Times the CPU kernels at the instruction level `isa`, or else at the best level.

    Raises:
        ConfigError: the processor does not have the level, or there are no kernels, or a name is wrong.
    """
    environment = {} if isa is None else {"QUIRE_CPU_ISA": isa}
    answer = _ask(question, "time-ops", environment=environment)
    assert isinstance(answer, OpsTimed)
    return answer


def _ask(
    about: EngineConfig | OpsQuestion, *question: str, environment: Mapping[str, str] = MappingProxyType({})
) -> InspectionAnswer:
    command = [sys.executable, "-P", "-m", "quire.executor.inspection.process", *question]
    done = subprocess.run(
        command, input=msgspec.msgpack.encode(about), stdout=subprocess.PIPE, env={**os.environ, **environment}
    )
    if done.returncode:
        raise QuireError(f"the process that was asked ended with code {done.returncode}; its messages say why.")
    answer = msgspec.msgpack.decode(done.stdout, type=InspectionAnswer)
    if isinstance(answer, InspectionRefused):
        raise ConfigError(answer.message)
    return answer
