"""Shared parts of the commands that write a checkpoint to a new folder in another form."""

import argparse
from collections.abc import Callable
from pathlib import Path

from quire.core.config.engine_args import EngineArgs
from quire.core.config.parallel import EplbConfig, ParallelConfig
from quire.core.errors import ConfigError
from quire.core.logging import configure
from quire.core.wire.inspection import FilesSaved
from quire.frontend.flags.parser import CommandParser, add_engine_options


def add_arguments(parser: CommandParser, command: str, common: list[str]) -> None:
    """Adds the engine's options and `--output`. The short help shows the options in `common`."""
    add_engine_options(parser, positional_model=True)
    group = parser.add_argument_group(command)
    group.add_argument("--output", required=True, metavar="FOLDER", help="New folder for the files.")
    parser.common = common


def write(args: argparse.Namespace, command: str, writer: Callable[[EngineArgs, Path], FilesSaved]) -> None:
    """Writes the folder with `writer`, and prints how to serve it."""
    configure(command, args.engine_args.observability.logging)
    parallel = args.engine_args.parallel
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        raise ConfigError("Files for ranks are for one engine: leave out --data-parallel-size.")
    folder = Path(args.output).expanduser().resolve()
    saved = writer(args.engine_args, folder)
    flags = _division(parallel)
    print(f"{saved.num_files} files, {saved.num_bytes / 2**30:.2f} GiB. Serve them: quire serve {folder}{flags}")


def _division(parallel: ParallelConfig) -> str:
    """The flags by which ranks read what was written for them."""
    size = parallel.tensor_parallel_size
    if size == 1:
        return ""
    flags = f" --tensor-parallel-size {size}"
    if parallel.enable_expert_parallel:
        flags += f" --enable-expert-parallel --expert-placement-strategy {parallel.expert_placement_strategy}"
    if parallel.enable_eplb:
        num_redundant = (parallel.eplb_config or EplbConfig()).num_redundant_experts
        flags += f" --enable-eplb --eplb-config.num_redundant_experts {num_redundant}"
    return flags
