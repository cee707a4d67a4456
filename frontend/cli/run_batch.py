"""`quire run-batch`: a JSONL file of requests through an engine of its own."""

import argparse
import asyncio

from quire.frontend.cli.arguments import CommandParser, add_batch_options, add_engine_options

COMMON = ["--model", "--resume", "--max-num-seqs", "--max-model-len", "--dtype", "--tensor-parallel-size", "--device"]


def add_arguments(parser: CommandParser) -> None:
    add_batch_options(parser)
    add_engine_options(parser)
    parser.common = COMMON


def run(args: argparse.Namespace) -> int:
    """0 when every request succeeded."""
    from quire.frontend.run_batch import run_batch  # here, so that --help need not load the engine's client

    return asyncio.run(run_batch(args.engine_args, args.batch_config))
