"""Main of a process that answers one question about a model: `python -m quire.executor.inspection.process QUESTION`.

It reads an `EngineConfig` from standard input and writes an `InspectionAnswer` to standard output, both as MessagePack.
The questions:

- `plan [BYTES]`, with the bytes of the device's memory if it is another than this machine's;
- `save-shards FOLDER`.
"""

import os
import sys
from pathlib import Path

import msgspec

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError
from quire.core.logging import configure
from quire.core.wire.inspection import InspectionAnswer, Refused


def main() -> None:
    """Answers the question that the arguments ask."""
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what libraries print must not stand in the answer
        configure("inspection", config.logging)
        answer.write(msgspec.msgpack.encode(_answer(config, sys.argv[1:])))


def _answer(config: EngineConfig, arguments: list[str]) -> InspectionAnswer:
    # Imported here: after the logging is set up, which the import of torch may use.
    from quire.executor.inspection.load_plan import plan_load
    from quire.executor.inspection.shard_writer import save_shards

    question, *rest = arguments
    try:
        if question == "save-shards":
            return save_shards(config, Path(rest[0]))
        return plan_load(config, int(rest[0]) if rest else None)
    except ConfigError as error:
        return Refused(str(error))


if __name__ == "__main__":
    main()
