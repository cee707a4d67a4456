"""`quire save-sharded-state`: a checkpoint as files that each rank of a tensor-parallel group reads alone."""

import argparse

from quire.frontend.cli import checkpoint_writer
from quire.frontend.flags.parser import CommandParser

COMMON = ["--output", "--tensor-parallel-size", "--dtype", "--quantization", "--load-format"]


def add_arguments(parser: CommandParser) -> None:
    checkpoint_writer.add_arguments(parser, "save-sharded-state", COMMON)


def run(args: argparse.Namespace) -> None:
    from quire.frontend.launch.inspection import save_shards  # imported here, so that --help reads no checkpoint

    checkpoint_writer.write(args, "save-sharded-state", save_shards)
