"""The constraint that an output must match: a Struct for the Python API and the HTTP field `structured_outputs`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.core.wire.field_types import check_types

GrammarBackend = Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]
"""Libraries that hold an output to a grammar, by vLLM's names; auto takes the first that supports the constraint."""

ConstraintKind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(Struct, omit_defaults=True, forbid_unknown_fields=True, rename={"backend": "_backend"}):
    """One constraint on the output, with vLLM's names: exactly one of the first six fields is set.

    Raises:
        ParameterError: none or several of these fields are set, or one is empty; `param` names the field.
    """

    json: Annotated[str | dict[str, Any] | bool | None, Meta(description="A JSON schema, as an object or as text.")] = (
        None
    )
    regex: Annotated[str | None, Meta(description="A regular expression that the whole output matches.")] = None
    choice: Annotated[list[str] | None, Meta(description="The output is one of these texts.")] = None
    grammar: Annotated[str | None, Meta(description="A context-free grammar, in GBNF or in Lark's notation.")] = None
    json_object: Annotated[bool | None, Meta(description="The output is some JSON object.")] = None
    disable_any_whitespace: Annotated[bool, Meta(description="JSON in one line, without optional whitespace.")] = False
    disable_additional_properties: Annotated[
        bool, Meta(description="JSON objects hold no properties but those that their schema names.")
    ] = False
    whitespace_pattern: Annotated[
        str | None, Meta(description="Regular expression for the whitespace between JSON's tokens.")
    ] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None,
        Meta(description="Free text with constrained parts between tags, in XGrammar's notation."),
    ] = None
    backend: Annotated[GrammarBackend | None, Meta(description="The library to use; the server's choice if None.")] = (
        None
    )

    def __post_init__(self) -> None:
        check_types(self)
        chosen = [kind for kind in CONSTRAINT_KINDS if getattr(self, kind) not in (None, False)]
        if self.json is False:
            raise ParameterError("The schema false allows no output at all.", param="structured_outputs.json")
        if len(chosen) != 1:
            what = f"sets {' and '.join(chosen)}" if chosen else "sets none"
            raise ParameterError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINT_KINDS)}; this one {what}.",
                param="structured_outputs",
            )
        if not getattr(self, chosen[0]) and chosen[0] != "json":
            raise ParameterError(f"{chosen[0]} must not be empty.", param=f"structured_outputs.{chosen[0]}")

    @property
    def kind(self) -> ConstraintKind:
        """The field that is set."""
        return next(kind for kind in CONSTRAINT_KINDS if getattr(self, kind) not in (None, False))


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's name of before 0.11, for `SamplingParams(guided_decoding=...)`."""
