"""Engine options on the command line of a program: what vLLM's programs call FlexibleArgumentParser and EngineArgs."""

import argparse
from typing import Self

from quire.core.config.engine_args import EngineArgs
from quire.frontend.flags.parser import CommandParser, add_engine_fields
from quire.frontend.launch.engine_options import EngineOptions


class ProgramParser(CommandParser):
    """An `argparse.ArgumentParser` for programs, which takes and explains flags as Quire's own commands do.

        parser = CommandLineOptions.add_cli_args(ProgramParser(description="..."))
        parser.set_defaults(model="Qwen/Qwen3-0.6B")
        parser.add_argument("--max-tokens", type=int)
        args = parser.parse_args()

    Args:
        prog: the program's name; None for its file's.
    """

    def __init__(self, prog: str | None = None, *, description: str | None = None) -> None:
        super().__init__(prog, description or "")


class CommandLineOptions(EngineOptions):
    """Engine options that a program takes from its own command line."""

    @staticmethod
    def add_cli_args(parser: ProgramParser) -> ProgramParser:
        """Adds all engine options. Each becomes an attribute of the parsed arguments, with its default if not given.

        Returns:
            The same parser.
        """
        add_engine_fields(parser)
        parser.set_defaults(**EngineArgs().flat())
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The engine options among parsed arguments; those of the program itself are left out."""
        given = vars(args)
        return cls(**{name: given[name] for name in EngineArgs().flat() if name in given})
