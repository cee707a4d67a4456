"""`quire pack`: a checkpoint's weights as the kernels of this processor read them, in files that a start maps."""

import argparse

from quire.frontend.cli import checkpoint_writer
from quire.frontend.flags.parser import CommandParser

COMMON = ["--output", "--quantization", "--tensor-parallel-size", "--dtype"]


def add_arguments(parser: CommandParser) -> None:
    checkpoint_writer.add_arguments(parser, "pack", COMMON)


def run(args: argparse.Namespace) -> None:
    from quire.frontend.launch.inspection import pack_model  # imported here, so that --help reads no checkpoint

    checkpoint_writer.write(args, "pack", pack_model)
