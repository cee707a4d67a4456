"""The options of one command, each declared by the field of an option Struct."""

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from msgspec import Struct

from quire.core.config.engine_args import convert_group
from quire.frontend.flags.values import Field, fields_of
from quire.frontend.refusals.flags import FlagRefusals
from quire.frontend.refusals.unsupported_flags import UnsupportedFlag


@dataclasses.dataclass(frozen=True)
class Composite:
    """Fields that become one object, stored in the parsed namespace under `dest`."""

    dest: str
    names: list[str]
    build: Callable[[dict[str, Any]], Any]


class ListAction(argparse.Action):
    """Stores a list of checked items; a single null means no list."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, None if values == [None] else values)


class _Given(list[Any]):
    """The items that a repeatable flag was given, which no longer are a file's."""


class RepeatableAction(argparse.Action):
    """Adds checked items to the earlier ones of the command line; the first items replace the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        given = _Given([*before, *values] if isinstance(before, _Given) else values)
        setattr(namespace, self.dest, None if given == [None] else given)


class OptionParser(argparse.ArgumentParser):
    """An argparse parser that knows the field of each option."""

    def __init__(self, prog: str | None, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)
        self.fields: dict[str, Field] = {}  # by flag
        self.common: list[str] = []  # flags that plain --help shows
        self.refused_sections: list[str] = []
        self._left_out: dict[str, UnsupportedFlag] = {}
        self.composites: list[Composite] = []

    def add_struct(self, struct: type[Struct], *, without: Collection[str] = ()) -> list[str]:
        """Adds a flag for each field of `struct`, as a group named like it; returns the fields' names."""
        group = self.add_argument_group(struct.__name__, (struct.__doc__ or "").split("\n")[0])
        chosen = [field for field in fields_of(struct) if field.name not in without]
        for field in chosen:
            self.fields[field.flag] = field
            self._add_field(group, field)
        return [field.name for field in chosen]

    def _add_field(self, group: Any, field: Field) -> None:
        shared: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        text = escape(field.description)
        short = [alias for alias in field.aliases if not alias.startswith("--")]
        names = [*short, field.flag, *(alias for alias in field.aliases if alias not in short)]
        if field.is_bool:
            group.add_argument(*names, action="store_true", help=text, **shared)
            negated = "--no-" + field.flag.removeprefix("--")
            group.add_argument(negated, action="store_false", help=argparse.SUPPRESS, **shared)
            return
        if field.is_list and not field.is_json:
            shared |= {"nargs": "+", "action": RepeatableAction if field.repeatable else ListAction}
        elif field.value_optional:
            shared |= {"nargs": "?", "const": True}
        if field.required:
            shared |= {"required": True}
        group.add_argument(*names, type=field, metavar=field.metavar, help=text, **shared)

    def add_config(
        self, dest: str, struct: type[Struct], *, section: str, without: Collection[str] = (), because: str = ""
    ) -> None:
        """Adds a flag for each field of `struct`; after parsing, `args.<dest>` is one of those structs.

        Args:
            section: of unsupported_flags.json, whose flags are refused with their reasons.
            without: fields whose flags the command refuses, unless they have their default; `because` says why.
        """
        self.compose(dest, self.add_struct(struct, without=without), lambda given: convert_group(struct, given))
        self.refused_sections.append(section)
        for field in fields_of(struct):
            if field.name in without:
                self._left_out[field.flag] = UnsupportedFlag(because, field.harmless)

    def compose(self, dest: str, names: list[str], build: Callable[[dict[str, Any]], Any]) -> None:
        """After parsing, `args.<dest>` is `build(the fields among names that were given)`."""
        self.composites.append(Composite(dest, names, build))

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """Every spelling that the parser takes, short ones too."""
        return self._option_string_actions

    @property
    def refusals(self) -> FlagRefusals:
        return FlagRefusals(self.flags, self.refused_sections, self._left_out)


def escape(text: str) -> str:
    """`text` escaped for argparse's `help=`."""
    return text.replace("%", "%%")
