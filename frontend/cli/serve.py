"""`quire serve`: the HTTP server on one model."""

import argparse
import contextlib
import gc
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

from quire.core import envs
from quire.core.errors import ConfigError
from quire.frontend.cli.command_group import end_at_once
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.http.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.frontend.launch.setup import EngineSetup

COMMON = [
    "--host", "--port", "--api-key", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs",
    "--gpu-memory-utilization", "--tensor-parallel-size", "--device",
]  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    add_engine_options(parser, positional_model=True)
    parser.add_config("server_config", ServerConfig, section="server")
    parser.common = COMMON


def run(args: argparse.Namespace) -> None:
    """Serves until a signal comes, or becomes a node that serves no HTTP."""
    # Imported here, so that --help does not load the server, and late, so that the engine loads at the same time.
    from quire.core.logging import configure
    from quire.frontend.http.connections.listener import bind, release
    from quire.frontend.launch.headless import run_node
    from quire.frontend.launch.setup import EngineSetup

    args.server_config.check_keys()
    args.server_config.check_logs(args.engine_args.observability)
    configure("serve", args.engine_args.observability.logging)
    if args.engine_args.parallel.headless:
        run_node(args.engine_args)
        return
    listener = bind(args.server_config)
    end_at_once(partial(release, listener, args.server_config))
    try:
        setup = EngineSetup.from_args(args.engine_args, "server")
        with contextlib.closing(setup):
            setup.launch_ahead()
            number = args.server_config.api_server_count or len(setup.config.served_engines)
            lora = args.engine_args.lora
            takes_adapters = lora.enable_lora or lora.enable_prompt_adapter
            if number > 1 and takes_adapters and envs.read_flag("ALLOW_RUNTIME_LORA_UPDATING"):
                raise ConfigError(
                    f"QUIRE_ALLOW_RUNTIME_LORA_UPDATING is for one API server, and this command has {number}, of which "
                    "one alone would load an adapter; add --api-server-count 1, or name adapters with --lora-modules."
                )
            if number == 1:
                _serve(setup, args.server_config, listener)
            elif args.server_config.admin_port is not None:
                raise ConfigError(
                    f"--admin-port is for one API server, and this command has {number}; add --api-server-count 1, or "
                    "use --admin-api-key."
                )
            else:
                _serve_by_several(number, setup, args.server_config, listener)
    finally:
        release(listener, args.server_config)


def _serve(setup: "EngineSetup", server: ServerConfig, listener: socket.socket) -> None:
    gc.disable()  # during imports, as in the engine
    import uvloop

    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.http.connections.signals import exit_soon
    from quire.frontend.http.server import serve

    gc.freeze()  # what imports made stays: the collection at the end of the start need not visit it
    gc.enable()  # before the start is over: it may wait for other hosts for hours
    engine = AsyncLLM.from_setup(
        setup,
        max_log_len=server.max_log_len,
        log_outputs=server.enable_log_outputs,
        log_deltas=server.enable_log_deltas,
    )

    async def run() -> None:
        await serve(engine, server, listener, greet=_greets(setup))
        exit_soon()

    uvloop.run(run())


def _serve_by_several(number: int, setup: "EngineSetup", server: ServerConfig, listener: socket.socket) -> None:
    import uvloop

    from quire.frontend.servers.server_group import ServerGroup

    async def run() -> None:
        await ServerGroup(number, setup, server, listener, greet=_greets(setup)).run()

    uvloop.run(run())


def _greets(setup: "EngineSetup") -> bool:
    """Returns True for people at a terminal or with the demo model. A service's log needs no greeting."""
    return setup.args.model.model is None or sys.stdout.isatty()
