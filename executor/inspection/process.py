"""Main of a process that answers one question about a model: `python -m quire.executor.inspection.process QUESTION`.

It reads an `EngineConfig` from standard input and writes an `InspectionAnswer` to standard output, both as MessagePack.
The questions: `plan [BYTES]`, with the bytes of the device's memory if it is another than this machine's.
"""

import os
import sys

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
    from quire.executor.inspection.load_plan import plan_load  # after the logging, which torch's import may use

    try:
        return plan_load(config, int(arguments[1]) if arguments[1:] else None)
    except ConfigError as error:
        return Refused(str(error))


if __name__ == "__main__":
    main()
