"""Main of a process that answers one question about a model: `python -m quire.executor.inspection.process QUESTION`.

It reads an `EngineConfig` from standard input and writes an `InspectionAnswer` to standard output, both as MessagePack.
The questions:

- `plan [BYTES]`, with the bytes of the device's memory if it is another than this machine's;
- `fit MEMORIES`: why ranks do not fit into devices; by rank, a list of devices with [total, free] bytes, in JSON;
- `cost RANKS...`: the cost of a rank's step, for each number of ranks that may divide the layers;
- `save-shards FOLDER`;
- `pack FOLDER`;
- `time-ops`, which is about no model: an `OpsQuestion` stands for the configuration.
"""

import os
import sys
from pathlib import Path

import msgspec

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig, configure
from quire.core.wire.inspection import InspectionAnswer, InspectionRefused, Obstacles, OpsQuestion

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""


def main() -> None:
    """Answers the question in the arguments. Ctrl-C, which also reaches the asking command, ends it."""
    try:
        _answer_arguments()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _answer_arguments() -> None:
    question, *rest = sys.argv[1:]
    message = sys.stdin.buffer.read()
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # output of libraries must not mix with the answer
        answer.write(msgspec.msgpack.encode(_answer(message, question, rest)))


def _answer(message: bytes, question: str, rest: list[str]) -> InspectionAnswer:
    try:
        if question == "time-ops":
            return _time_ops(msgspec.msgpack.decode(message, type=OpsQuestion))
        return _inspect(msgspec.msgpack.decode(message, type=EngineConfig), question, rest)
    except ConfigError as error:
        return InspectionRefused(str(error))


def _time_ops(question: OpsQuestion) -> InspectionAnswer:
    configure("ops", LoggingConfig())
    from quire.executor.inspection.ops_timing import time_ops  # imported here: see below

    return time_ops(question)


def _inspect(config: EngineConfig, question: str, rest: list[str]) -> InspectionAnswer:
    configure("inspection", config.logging)
    # Imported here, after the logging is set up, because the import of torch may log.
    from quire.executor.inspection.folders import write_errors
    from quire.executor.inspection.load_plan import find_obstacles, plan_load
    from quire.executor.inspection.model_cost import count_cost
    from quire.executor.inspection.pack_writer import pack_model
    from quire.executor.inspection.shard_writer import save_shards
    from quire.executor.memory.plan import DeviceMemory

    if question in ("save-shards", "pack"):
        folder = Path(rest[0])
        with write_errors(folder):
            return pack_model(config, folder) if question == "pack" else save_shards(config, folder)
    if question == "fit":
        memories = msgspec.json.decode(rest[0], type=list[list[tuple[int, int]]])
        return Obstacles(find_obstacles(config, [[DeviceMemory(*each) for each in own] for own in memories]))
    if question == "cost":
        return count_cost(config, [int(size) for size in rest])
    return plan_load(config, int(rest[0]) if rest else None)


if __name__ == "__main__":
    main()
