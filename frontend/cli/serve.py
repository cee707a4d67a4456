"""`quire serve`: the HTTP server on one model."""

import argparse
import sys

from quire.frontend.cli.arguments import CommandParser, add_engine_options, add_server_options

COMMON = [
    "--host", "--port", "--api-key", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs",
    "--gpu-memory-utilization", "--tensor-parallel-size", "--device",
]  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    add_engine_options(parser, positional_model=True)
    add_server_options(parser)
    parser.common = COMMON


def run(args: argparse.Namespace) -> None:
    """Serves until told to stop."""
    import uvloop  # here, as the rest, so that --help need not load the server

    from quire.core.logging import configure
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.listener import bind, release
    from quire.frontend.server import serve

    configure("serve")
    listener = bind(args.server_config)
    try:
        engine = AsyncLLM.from_engine_args(args.engine_args, usage="server")
        # People at a terminal, and whoever tries the demo model, want to see what to do next; a service's log does not.
        greet = args.engine_args.model.model is None or sys.stdout.isatty()
        uvloop.run(serve(engine, args.server_config, listener, greet=greet))
    finally:
        release(listener, args.server_config)
