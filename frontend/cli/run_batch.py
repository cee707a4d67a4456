"""`quire run-batch`: runs a JSONL file of requests through a new engine."""

import argparse
import asyncio
import sys

from quire.core.logging import configure
from quire.frontend.batch.config import ANSWER_OPTIONS, BatchConfig
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.http.server_config import ServerConfig

COMMON = [
    "--model",
    "--resume",
    "--overwrite",
    "--max-num-seqs",
    "--max-model-len",
    "--dtype",
    "--tensor-parallel-size",
    "--device",
]
NO_SERVER = "No server listens while a batch runs; the figures are printed at the end."


def add_arguments(parser: CommandParser) -> None:
    parser.add_config("batch_config", BatchConfig, section="run-batch")
    add_engine_options(parser)
    without = set(ServerConfig.__struct_fields__).difference(ANSWER_OPTIONS)
    parser.add_config("server_config", ServerConfig, section="server", without=without, because=NO_SERVER)
    parser.common = COMMON


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 when the run came to its end."""
    from quire.frontend.batch.run_batch import run_batch  # imported here, so that --help loads no engine client

    configure("batch", args.engine_args.observability.logging)
    try:
        return asyncio.run(run_batch(args.engine_args, args.batch_config, args.server_config))
    except KeyboardInterrupt:
        print("quire run-batch: stopped; the same command with --resume goes on from here.", file=sys.stderr)
        raise
