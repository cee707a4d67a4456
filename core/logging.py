"""Logs on stderr: one line an event, with time, level and the process's role."""

import logging
import os
import sys

from quire.core import envs
from quire.core.errors import ConfigError

_FORMAT = "%(asctime)s %(levelname)-7s %(part)s  %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; call with `__name__`."""
    return logging.getLogger(name)


def configure(part: str) -> None:
    """Sets up logging for this process. `part` names its role: serve, engine, worker-tp0.

    `QUIRE_LOGGING_LEVEL` sets the level, `QUIRE_LOGGING_PREFIX` goes before each line, and `QUIRE_CONFIGURE_LOGGING=0`
    leaves logging to the host program.
    """
    if not envs.read_flag("CONFIGURE_LOGGING"):
        return
    root = logging.getLogger("quire")
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    prefix = envs.read("LOGGING_PREFIX", "") or ""
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S", defaults={"part": part}))
    root.addHandler(handler)
    root.setLevel(level())
    root.propagate = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def level() -> str:
    """The lowest level that is logged, from `QUIRE_LOGGING_LEVEL`.

    Raises:
        ConfigError: there is no such level.
    """
    name = (envs.read("LOGGING_LEVEL") or "INFO").upper()
    if name not in logging.getLevelNamesMapping():
        raise ConfigError(f"QUIRE_LOGGING_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {name!r}.")
    return name
