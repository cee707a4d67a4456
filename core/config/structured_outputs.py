"""Options: outputs that match a schema or a grammar."""

import importlib.util
from typing import Annotated

from msgspec import Meta, Struct

from quire.core.errors import ConfigError
from quire.core.wire.structured_outputs import GrammarBackend

_OPTIONAL_PACKAGES = {"outlines": "outlines_core", "lm-format-enforcer": "lmformatenforcer"}
"""Import names of the libraries that are installed on demand, by backend."""


class StructuredOutputsOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for constrained outputs, unless the request has its own."""

    backend: GrammarBackend = "auto"
    disable_fallback: bool = False  # auto is xgrammar alone
    max_whitespace: Annotated[int, Meta(ge=1)] | None = 12  # characters between two tokens of JSON; None for no limit
    disable_any_whitespace: bool = False  # JSON in one line
    disable_additional_properties: bool = False  # JSON objects hold only what their schema names
    enable_in_reasoning: bool = False  # the format holds from the first token, reasoning included
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""

    def __post_init__(self) -> None:
        if self.reasoning_parser or self.reasoning_parser_plugin:
            raise ValueError("name parsers with --reasoning-parser and --reasoning-parser-plugin")
        package = _OPTIONAL_PACKAGES.get(self.backend)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--structured-outputs-config: the backend {self.backend} is not installed here; "
                f"pip install 'quire[{self.backend}]', or choose auto, xgrammar or guidance."
            )


class StructuredOutputsConfig(Struct, frozen=True, kw_only=True):
    """Outputs that match a schema or a grammar."""

    structured_outputs_config: Annotated[
        StructuredOutputsOptions | None,
        Meta(
            description="Grammar backend (auto, xgrammar, guidance, outlines, lm-format-enforcer), disable_fallback, "
            "disable_any_whitespace, disable_additional_properties, enable_in_reasoning, and max_whitespace, the most "
            "characters of whitespace between two tokens of JSON (12; null for no limit, with which some models never "
            "end), as JSON or by dotted keys.",
            extra={"parse": "json"},
        ),
    ] = None
