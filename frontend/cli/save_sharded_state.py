"""`quire save-sharded-state`: a checkpoint as files that each rank of a tensor-parallel group reads alone."""

import argparse
from pathlib import Path

from quire.core.logging import configure
from quire.frontend.flags.parser import CommandParser, add_engine_options

COMMON = ["--output", "--tensor-parallel-size", "--dtype", "--quantization", "--load-format"]


def add_arguments(parser: CommandParser) -> None:
    add_engine_options(parser, positional_model=True)
    group = parser.add_argument_group("save-sharded-state")
    group.add_argument("--output", required=True, metavar="FOLDER", help="New folder for the files.")
    parser.common = COMMON


def run(args: argparse.Namespace) -> None:
    from quire.frontend.launch.inspection import save_shards  # imported here, so that --help reads no checkpoint

    configure("save-sharded-state", args.engine_args.observability.logging)
    folder = Path(args.output).expanduser().resolve()
    saved = save_shards(args.engine_args, folder)
    size = args.engine_args.parallel.tensor_parallel_size
    flag = f" --tensor-parallel-size {size}" if size > 1 else ""
    print(f"{saved.num_files} files, {saved.num_bytes / 2**30:.2f} GiB. Serve them: quire serve {folder}{flag}")
