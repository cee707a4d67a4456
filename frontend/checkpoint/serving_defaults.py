"""A checkpoint's defaults for the options that name parsers."""

from pathlib import Path

import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.http.server_config import ServerConfig

FILE_NAME = "serving.json"


class ServingDefaults(Struct, forbid_unknown_fields=True, kw_only=True):
    """Content of `serving.json` in a checkpoint's folder: names of parsers, never code."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


def with_serving_defaults(server: ServerConfig, folder: Path) -> ServerConfig:
    """The options, with unset ones filled in from `serving.json` in `folder`, if there is one.

    Raises:
        ConfigError: the file is malformed, or names a parser that does not exist.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return server
    try:
        defaults = msgspec.json.decode(path.read_bytes(), type=ServingDefaults)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}. Correct the file, or remove it.") from None
    changes: dict[str, object] = {}
    if server.tool_call_parser is None and defaults.tool_call_parser is not None:
        changes |= {"tool_call_parser": defaults.tool_call_parser, "enable_auto_tool_choice": True}
    if server.reasoning_parser is None:
        changes["reasoning_parser"] = defaults.reasoning_parser
    return msgspec.structs.replace(server, **changes)
