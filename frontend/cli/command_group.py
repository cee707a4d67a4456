"""A program with commands: `quire`, and `quire bench` inside it. Picks a command, runs it, returns its exit code.

A command's module is imported only when the command is named, so that overviews answer at once. Each module has
`add_arguments(parser)`, which declares its arguments, and `run(args)`, which returns an exit code or None.
"""

import importlib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Union

import quire

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
ROOMY = 72  # terminal width from which a summary fits beside its command
GAP = 2  # least number of columns between a command and its summary


@dataclass(frozen=True)
class Command:
    """A command's module, and its summary in one line."""

    module: str
    summary: str
    refused_sections: tuple[str, ...] = ()  # of unsupported_flags.json, besides those of its option Structs
    is_service: bool = False  # SIGTERM is the usual end, with exit code 0

    def run(self, prog: str, arguments: list[str]) -> int:
        """The exit code; errors of Quire's own tree become one line on stderr."""
        if not self.is_service:
            return self._run(prog, arguments)
        former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        end_at_once()
        try:
            return self._run(prog, arguments)
        finally:
            for each, handler in former.items():
                signal.signal(each, handler)

    def _run(self, prog: str, arguments: list[str]) -> int:
        from quire.core.errors import QuireError  # imported here and below, so that overviews are quick
        from quire.frontend.flags.parser import CommandParser

        module = importlib.import_module(self.module)
        parser = CommandParser(prog, self.summary)
        parser.refused_sections.extend(self.refused_sections)
        module.add_arguments(parser)
        args = parser.parse_args(arguments)
        try:
            return module.run(args) or 0
        except QuireError as error:
            return complain(prog, str(error), FAILED)


@dataclass(frozen=True)
class CommandGroup:
    """Commands by name, and the reasons why some expected ones are missing."""

    summary: str
    commands: Mapping[str, Union[Command, "CommandGroup"]]
    refused: Mapping[str, str] = field(default_factory=dict)

    def run(self, prog: str, arguments: list[str]) -> int:
        """The exit code of `prog ARGUMENTS`: 0, 1 for an error in the work, 2 for wrong usage."""
        name = arguments[0] if arguments else "--help"
        if name in ("-h", "--help") or name.startswith("--help="):
            print(self.overview(prog))
            return 0
        if name in ("-v", "--version", "version"):
            print(quire.__version__)
            return 0
        if name == "help":
            return self.run(prog, [*arguments[1:], "--help"])
        command = self.commands.get(name.replace("_", "-"))
        if command is None:
            return complain(prog, self._explain(name), USAGE_ERROR)
        return command.run(f"{prog} {name.replace('_', '-')}", arguments[1:])

    def _explain(self, name: str) -> str:
        if name in self.refused:
            return f"{name} is not supported: {self.refused[name]}"
        near = get_close_matches(name, self.commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(self.commands)}."
        return f"there is no {'option' if name.startswith('-') else 'command'} {name!r}; {hint}"

    def overview(self, prog: str) -> str:
        """The text of `prog --help`, for any width of terminal."""
        width = max(24, min(100, shutil.get_terminal_size().columns))
        rows = [f"Usage: {prog} COMMAND [options]", "", textwrap.fill(self.summary, width), ""]
        indent = " " * (2 + max(map(len, self.commands)) + GAP)
        for name, command in self.commands.items():
            if width >= ROOMY:
                left = f"  {name}".ljust(len(indent))
                rows.append(textwrap.fill(left + command.summary, width, subsequent_indent=indent))
            else:
                rows.append(f"  {name}")
                rows.append(textwrap.fill(command.summary, width, initial_indent="    ", subsequent_indent="    "))
        more = f"`{prog} help COMMAND` or `{prog} COMMAND --help` tells more; --version prints the version."
        rows += ["", textwrap.fill(more, width)]
        return "\n".join(rows)


def end_at_once(last: Callable[[], object] = lambda: None) -> None:
    """Makes SIGTERM and Ctrl-C call `last` and end the process at once, for times when no event loop handles them.

    A handler that raised an error instead might do so within C code or a callback, which would swallow it, or crash.
    Engines end by themselves, because they notice that their parent is gone.
    """

    def end(code: int) -> None:
        last()
        os._exit(code)

    signal.signal(signal.SIGTERM, lambda *_: end(0))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as behind nohup
        signal.signal(signal.SIGINT, lambda *_: end(INTERRUPTED))


def complain(prog: str, message: str, code: int) -> int:
    """One line on stderr; returns `code`."""
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return code
