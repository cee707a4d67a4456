"""The parser of one command. It derives all flags from option Structs, so nothing about a flag is written twice.

Beyond argparse: `--a_b` for `--a-b`, `--x`/`--no-x`, dotted JSON keys, `--config FILE`, `--help=TOPIC`, and errors of
one line that name the flag, the value and what is allowed.
"""

import argparse
import dataclasses
import re
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.frontend.flags import config_file, help_pages
from quire.frontend.flags.declaration import OptionParser
from quire.frontend.flags.dotted import DottedValue, merge

USAGE_ERROR = 2
NUMBER = re.compile(r"-\d*\.?\d+")
TRUTHS = {"true": True, "false": False}
ARGPARSE_WORDS = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs at least one value",
}


@dataclasses.dataclass
class CommandLine:
    """The words of a command line, sorted before argparse parses them."""

    tokens: list[str] = dataclasses.field(default_factory=list)  # for argparse
    dotted: list[DottedValue] = dataclasses.field(default_factory=list)
    seen: set[str] = dataclasses.field(default_factory=set)  # flags that were given
    config_path: str | None = None


class CommandParser(OptionParser):
    """Parses one command's arguments; `parse_args` answers `--help` and leaves with code 2 on a usage error."""

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """The namespace, with the composed objects in place of their fields."""
        tokens = list(sys.argv[1:] if args is None else args)
        self._answer_help(tokens)
        line = self._read(tokens)
        if line.config_path is not None:
            line.dotted[:0] = self._use_config_file(line.config_path)
        result = vars(super().parse_args(line.tokens, namespace))
        result.pop("config", None)
        self._settle_model(result, line.seen)
        for item in line.dotted:
            self._merge(result, item)
        for composite in self.composites:
            given = {name: result.pop(name) for name in composite.names if name in result}
            try:
                result[composite.dest] = composite.build(given)
            except ConfigError as error:
                self.error(str(error))
        return argparse.Namespace(**result)

    def _answer_help(self, tokens: list[str]) -> None:
        for token in tokens[: tokens.index("--")] if "--" in tokens else tokens:
            if token in ("-h", "--help") or token.startswith("--help="):
                try:
                    print(help_pages.page(self, token.partition("=")[2]))
                except LookupError as error:
                    self.error(str(error.args[0]))
                self.exit(0)

    def _read(self, tokens: list[str]) -> CommandLine:
        """Sorts `tokens`; refuses the flags that the parser does not take."""
        line = CommandLine()
        rest = deque(tokens)
        while rest:
            token = rest.popleft()
            if token == "--":
                line.tokens += [token, *rest]
                break
            name, equals, value = token.partition("=")
            if not name.startswith("-") or name == "-" or " " in name or NUMBER.fullmatch(token):
                line.tokens.append(token)
                continue
            name = normalize(name)
            base = name.split(".")[0].removesuffix("+")
            if name not in self.flags and base in self.flags:  # keys of an option's short flag
                long = next((each for each in self.flags[base].option_strings if each in self.fields), base)
                name, base = long + name.removeprefix(base), long
            if equals:
                rest.appendleft(value)
            if name not in self.flags and base in self.fields and self.fields[base].is_json:
                line.dotted.append(self._dotted(name, rest))
            elif name == "--config" and name in self.flags:
                line.config_path = self._value_of(name, rest)
            elif name not in self.flags and not self._is_glued(name):
                self._drop(name, rest, has_value=bool(equals))
            elif name in self.flags and self.flags[name].nargs == 0:
                line.tokens.append(self._switch(name, rest, has_value=bool(equals)))
            else:
                line.seen.add(name)
                line.tokens.append(name + equals + (rest.popleft() if equals else ""))
        return line

    def _is_glued(self, name: str) -> bool:
        """Returns True if `name` is a short flag with its value, as in `-iFILE`."""
        return name[1] != "-" and name[:2] in self.flags

    def _drop(self, name: str, rest: deque[str], *, has_value: bool) -> None:
        """Leaves out a flag that is not taken, with its value, if it asks for nothing; refuses it otherwise."""
        refusals = self.refusals
        if name.startswith("-O") and name[2:].isdigit():  # -O2
            rest.appendleft(name[2:])
            name = "-O"
        known = refusals.find(name)
        value: str | bool = True
        if known is not None and (not known.is_switch or has_value or _is_truth(rest)):
            value = self._value_of(name, rest)
        try:
            refusals.drop(name, value)
        except ConfigError as error:
            self.error(str(error))

    def _switch(self, name: str, rest: deque[str], *, has_value: bool) -> str:
        """The spelling of a switch for its wanted state: `--x`, `--no-x`, `--x=false`, `--x False`."""
        if not has_value and not _is_truth(rest):
            return name
        text, negated = rest.popleft(), f"--no-{name[2:]}"
        if text.lower() not in TRUTHS or negated not in self.flags:
            off = f"; {negated} turns it off" if negated in self.flags else ""
            self.error(f"{name} takes no value (got {text!r}){off}")
        return name if TRUTHS[text.lower()] else negated

    def _value_of(self, name: str, rest: deque[str]) -> str:
        if not rest or rest[0].startswith("--"):
            self.error(f"{name}: needs a value")
        return rest.popleft()

    def _dotted(self, name: str, rest: deque[str]) -> DottedValue:
        text = self._value_of(name, rest)
        flag, *keys = name.removesuffix("+").split(".")
        if not all(keys):
            self.error(f"{name}: a dotted key has an empty part")
        return DottedValue(flag, keys, name.endswith("+"), text)

    def _use_config_file(self, path: str) -> list[DottedValue]:
        """Makes the file's values the defaults; returns its dotted values."""
        try:
            settings = config_file.read(path, self.flags, self.fields, self.refusals)
        except ConfigError as error:
            self.error(str(error))
        self.set_defaults(**settings.values)
        for action in self._actions:
            if action.dest in settings.values:
                action.required = False
        return settings.dotted

    def _settle_model(self, result: dict[str, Any], seen: set[str]) -> None:
        """Takes the model from its position or --model, from both only if they agree; both override the file's."""
        if "model_tag" not in result:
            return
        tag = result.pop("model_tag")
        names = result.get("served_model_name") or []
        if tag is None and "model" not in result and len(names) > 1 and "/" in names[-1]:
            self.error(f"--served-model-name takes every word after it, {names[-1]!r} too; put the model first")
        if tag is None:
            return
        if "--model" in seen and result["model"] != tag:
            self.error(f"two models: {tag!r} and --model {result['model']!r}; give one")
        result["model"] = tag

    def _merge(self, result: dict[str, Any], item: DottedValue) -> None:
        field = self.fields[item.flag]
        try:
            given = result.get(field.name)  # a value that is given in parts replaces the default, as a whole one does
            result[field.name] = field.validate(merge(given, item))
        except ValueError as error:
            self.error(f"{item.spelling}: {error} (got {item.text!r})")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, then exit code 2."""
        match = re.match(r"argument (\S+): (.*)", message, re.DOTALL)
        if match:
            flag = next((name for name in match.group(1).split("/") if name.startswith("--")), match.group(1))
            text = re.sub(r"^invalid int value: (.*)", r"needs a whole number (got \1)", match.group(2))
            text = re.sub(r"^invalid float value: (.*)", r"needs a number (got \1)", text)
            if choice := re.match(r"invalid choice: (.*) \(choose from (.*)\)", text):
                names = choice[2].replace("'", "")
                text = f"choose from {names} (got {choice[1]})"
            message = f"{flag}: {ARGPARSE_WORDS.get(text, text)}"
        if message.startswith("unrecognized arguments"):
            message += "; --help says what there is"
        self.exit(USAGE_ERROR, f"{self.prog}: {' '.join(message.split())}\n")


def _is_truth(rest: deque[str]) -> bool:
    """Returns True if the next word is true or false; no model has such a name."""
    return bool(rest) and rest[0].lower() in TRUTHS


def normalize(flag: str) -> str:
    """`--a_b` as `--a-b`; keys after a dot stay as they are."""
    name, dot, keys = flag.partition(".")
    return (name.replace("_", "-") if name.startswith("--") else name) + dot + keys


def add_engine_options(parser: CommandParser, *, positional_model: bool = False) -> None:
    """All engine options; `args.engine_args` is then an `EngineArgs`."""
    add_sources(parser, positional_model=positional_model)
    parser.compose("engine_args", add_engine_fields(parser), lambda given: EngineArgs.from_flat(**given))


def add_sources(parser: CommandParser, *, positional_model: bool) -> None:
    """`--config`, and the model by its position."""
    if positional_model:
        parser.add_argument(
            "model_tag", nargs="?", metavar="MODEL", help="Folder or hub id of the model, as with --model."
        )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options by long name; the command line wins.")


def add_engine_fields(parser: CommandParser) -> list[str]:
    """All engine options, each an attribute of the parsed arguments by its name; returns the names."""
    parser.refused_sections.append("engine")
    return [name for group in msgspec.structs.fields(EngineArgs) for name in parser.add_struct(group.type)]
