"""`quire completions SHELL`: a script that completes commands, flags, choices and files in a shell."""

import argparse
import importlib

import msgspec.inspect as mi
import shtab

from quire.frontend.cli.command_group import Command, CommandGroup
from quire.frontend.flags.parser import CommandParser

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "shell",
        choices=SHELLS,
        metavar="{bash,zsh,fish}",
        help="The script belongs in ~/.local/share/bash-completion/completions/quire, in a folder "
        "of zsh's $fpath as _quire, or in ~/.config/fish/completions/quire.fish.",
    )


def run(args: argparse.Namespace) -> None:
    """Prints the script."""
    from quire.frontend.cli.main import QUIRE  # which names this module

    root = CommandParser("quire", QUIRE.summary)
    _add_commands(root, QUIRE)
    print(shtab.complete(root, args.shell))


def _add_commands(parser: CommandParser, program: CommandGroup) -> None:
    """Gives `parser` a parser for each command of `program`, with its flags and with those of nested programs."""
    children = parser.add_subparsers(parser_class=CommandParser)
    for name, command in program.commands.items():
        child = children.add_parser(name, description=command.summary, help=command.summary)
        if isinstance(command, Command):
            importlib.import_module(command.module).add_arguments(child)
            child.add_argument("--help", action="store_true", help="Explain the command, an option or a word.")
            _say_values(child)
        else:
            _add_commands(child, command)


def _say_values(parser: CommandParser) -> None:
    """Tells shtab what may follow each flag: one of its choices, else a file's name if it takes text."""
    for action in parser._actions:
        field = parser.fields.get(max(action.option_strings, key=len, default=""))
        if field is not None and isinstance(field.kind, mi.LiteralType):
            action.choices = [str(value) for value in field.kind.values]
        elif action.choices is None and action.nargs != 0 and action.metavar in ("TEXT", "FILE", "MODEL", "JSON", None):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
