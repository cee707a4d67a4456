"""Logs on stderr, one line an event with time, level and process role, or as the user's configuration file says."""

import json
import logging
import logging.config
import os
import sys
import textwrap
import unicodedata
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from quire.core import envs
from quire.core.errors import ConfigError

LogLevel = Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that is worked on, for lines in JSON."""

DATE_FORMAT = "%H:%M:%S"
_JSON_FIELDS = "%(asctime)s %(levelname)s %(name)s %(process)d %(message)s"
_VLLM = "vllm"
_HINTS = "quire.ops"


class LoggingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging options of each process; vLLM's `--logging-config`. None takes the environment variable's value."""

    log_level: LogLevel | None = None  # QUIRE_LOGGING_LEVEL
    formatter: Literal["text", "json"] = "text"
    configure_logging: bool | None = None  # QUIRE_CONFIGURE_LOGGING; False leaves logging to the host program
    pylogging_config_file: str | None = None  # QUIRE_LOGGING_CONFIG_PATH; decides alone, in Python's dictConfig schema

    @property
    def is_wanted(self) -> bool:
        """True if Quire sets up logging at all."""
        return envs.read_flag("CONFIGURE_LOGGING") if self.configure_logging is None else self.configure_logging

    @property
    def file(self) -> str | None:
        """The user's own logging configuration."""
        return self.pylogging_config_file or envs.read("LOGGING_CONFIG_PATH") or None


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; call with `__name__`."""
    spec = sys.modules["__main__"].__spec__
    if name == "__main__" and spec is not None:  # of `python -m`: `configure` sets up those below quire
        name = spec.name
    return logging.getLogger(name)


def configure(part: str, config: LoggingConfig, *, hints: bool = True) -> None:
    """Sets up logging for this process. `part` names its role: serve, engine, worker-tp0.

    `QUIRE_LOGGING_PREFIX` goes before each line of text.

    Args:
        hints: whether to log what is slow on this machine; False where another process has said the same.

    Raises:
        ConfigError: an environment variable or the logging configuration file is wrong.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not hints:
        logging.getLogger(_HINTS).setLevel(logging.ERROR)
    if not config.is_wanted:
        if config.pylogging_config_file:
            raise ConfigError("A logging configuration file does nothing with configure_logging off; leave one out.")
        return
    if config.file is not None:
        _configure_from(config.file, part)
        return
    root = logging.getLogger("quire")
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_formatter(part) if config.formatter == "json" else _text_formatter(part))
    if config.formatter == "json":
        handler.addFilter(_RequestIds())
    root.addHandler(handler)
    root.setLevel(config.log_level or level())
    root.propagate = False


def configure_for_program(part: str, config: LoggingConfig) -> None:
    """Sets up logging for a program that uses Quire as a library, unless the program has set up logging itself."""
    if not logging.getLogger("quire").hasHandlers():
        configure(part, config)


def level() -> str:
    """The lowest level that is logged, from `QUIRE_LOGGING_LEVEL`.

    Raises:
        ConfigError: there is no such level.
    """
    name = (envs.read("LOGGING_LEVEL") or "INFO").upper()
    if name not in logging.getLevelNamesMapping():
        raise ConfigError(f"QUIRE_LOGGING_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {name!r}.")
    return name


class _PlainFormatter(logging.Formatter):
    """Writes records so that no text in them, such as a client's, looks like another record or moves the cursor: the
    lines of a message after its first are indented, and control characters are spelled."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if not record.message.isprintable():
            first, *rest = map(_spelled, record.message.split("\n"))
            record.message = "\n".join([first, *(f"    {line}" for line in rest)])
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return textwrap.indent("\n".join(map(_spelled, super().formatException(ei).split("\n"))), "    ")


def _spelled(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(each if each == "\t" or _is_visible(each) else ascii(each)[1:-1] for each in line)


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


class _RequestIds(logging.Filter):
    """Adds the id of the HTTP request to records, unless whoever logs has given another."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = REQUEST_ID.get()
        if request_id is not None and not hasattr(record, "request_id"):
            record.request_id = request_id
        return True


def _text_formatter(part: str) -> logging.Formatter:
    prefix = envs.read("LOGGING_PREFIX", "") or ""
    return _PlainFormatter(f"{prefix}%(asctime)s %(levelname)-7s {part}  %(message)s", datefmt=DATE_FORMAT)


def _json_formatter(part: str) -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # imported here: most processes log text

    return JsonFormatter(_JSON_FIELDS, static_fields={"processName": part})


def _configure_from(path: str, part: str) -> None:
    """Applies a JSON file in the schema of `logging.config.dictConfig`. Every record has the role, as `part`.

    A logger `vllm` in the file configures `quire`, unless the file names that as well.
    """
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it holds no JSON object")
        loggers = settings.setdefault("loggers", {})
        if _VLLM in loggers:
            loggers.setdefault("quire", loggers[_VLLM])
        settings.setdefault("disable_existing_loggers", False)
        logging.config.dictConfig(settings)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise ConfigError(f"The logging configuration {path} cannot be used: {error}{cause}.") from None
    make = logging.getLogRecordFactory()

    def make_record(*args: object, **options: object) -> logging.LogRecord:
        record = make(*args, **options)
        record.part = part
        return record

    logging.setLogRecordFactory(make_record)
