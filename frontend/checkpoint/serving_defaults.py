"""A checkpoint's defaults for the options that name parsers."""

from pathlib import Path

import msgspec
from msgspec import Struct

from quire.core.config.reasoning import ReasoningConfig
from quire.core.errors import ConfigError

FILE_NAME = "serving.json"


class ServingDefaults(Struct, forbid_unknown_fields=True, kw_only=True):
    """Content of `serving.json` in a checkpoint's folder: names of parsers, never code."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def complete(self, reasoning: ReasoningConfig) -> ReasoningConfig:
        """The same options; an unset parser comes from the checkpoint."""
        return msgspec.structs.replace(reasoning, reasoning_parser=reasoning.reasoning_parser or self.reasoning_parser)


def read_serving_defaults(folder: Path) -> ServingDefaults:
    """Reads `serving.json` of the checkpoint in `folder`; empty without the file.

    Raises:
        ConfigError: the file is malformed.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return ServingDefaults()
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServingDefaults)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}. Correct the file, or remove it.") from None
