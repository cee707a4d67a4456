"""`quire serve`: the HTTP server on one model."""

import argparse

from quire.frontend.cli.arguments import CommandParser, add_engine_options, add_server_options

COMMON = [
    "--host", "--port", "--api-key", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs",
    "--gpu-memory-utilization", "--tensor-parallel-size", "--device",
]  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    add_engine_options(parser, positional_model=True)
    add_server_options(parser)
    parser.common = COMMON


def run(args: argparse.Namespace) -> int | None:
    from quire.frontend import launch  # here, so that --help need not load the server

    return launch.run_server(args.engine_args, args.server_config)
