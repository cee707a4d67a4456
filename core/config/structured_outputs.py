"""Options: outputs that match a schema or a grammar."""

from typing import Annotated

from msgspec import Meta, Struct

from quire.core.wire.structured_outputs import GrammarBackend


class StructuredOutputsOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How outputs are held to schemas and grammars, unless the request says it."""

    backend: GrammarBackend = "auto"
    disable_fallback: bool = False  # auto is xgrammar alone
    disable_any_whitespace: bool = False  # JSON in one line
    disable_additional_properties: bool = False  # JSON objects hold only what their schema names


class StructuredOutputsConfig(Struct, frozen=True, kw_only=True):
    """Outputs that match a schema or a grammar."""

    structured_outputs_config: Annotated[
        StructuredOutputsOptions | None,
        Meta(
            description="Grammar backend (auto, xgrammar, guidance, outlines, lm-format-enforcer), disable_fallback, "
            "disable_any_whitespace and disable_additional_properties, as JSON or by dotted keys.",
            extra={"parse": "json"},
        ),
    ] = None
