"""`quire bench step`: the time of each part of a decode step by batch size, or of steps in two implementations."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.bench.figures import write_json
from quire.frontend.bench.implementations import measure_alternating, paired_table
from quire.frontend.bench.step_budget import Budget, as_json, decode_budget, linear_names, read_timeline, table_rows
from quire.frontend.bench.tables import show
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.flags.ranges import COUNT
from quire.frontend.llm import LLM

DEFAULT_BLOCK_SIZE = 16


def add_arguments(parser: CommandParser) -> None:
    """Adds this benchmark's flags, and all engine options; vLLM has no such benchmark."""
    add_engine_options(parser)
    group = parser.add_argument_group("step")
    group.add_argument(
        "--batch-sizes",
        type=COUNT,
        nargs="+",
        default=[1, 32, 256],
        help="Running requests; one engine for each number.",
    )
    group.add_argument("--input-len", type=COUNT, default=128, help="Prompt tokens (default: %(default)s).")
    group.add_argument("--output-len", type=COUNT, default=64, help="Output tokens (default: %(default)s).")
    group.add_argument("--output-json", help="File for the figures.")
    group.add_argument(
        "--against",
        choices=("quire", "transformers"),
        help="Instead of a step's parts, the time of a prompt of --input-len tokens and of steps after short prompts: "
        "in --model-impl and in this implementation, on two engines in turns.",
    )
    group.add_argument("--num-turns", type=COUNT, default=5, help="PairedTimes of --against (default: %(default)s).")


def run(args: argparse.Namespace) -> int:
    """Measures every batch size. Returns the exit code."""
    if min(args.batch_sizes) < 1 or args.input_len < 1 or args.output_len < 4:
        raise ConfigError("--batch-sizes and --input-len must be at least 1, --output-len at least 4.")
    if args.against is not None:
        return _run_against(args)
    budgets = {size: _measure(args, size) for size in args.batch_sizes}
    show(_table(budgets))
    write_json(args.output_json, {"budgets": as_json(budgets)})
    return 0


def _run_against(args: argparse.Namespace) -> int:
    """Times two implementations in turns. Returns the exit code."""
    num_tokens = args.input_len + args.output_len
    names = args.engine_args.model.model_impl, args.against
    options = _options(args.engine_args, max(args.batch_sizes), num_tokens) | {"enable_prefix_caching": False}
    with LLM(**options) as first, LLM(**{**options, "model_impl": args.against}) as second:
        measured = measure_alternating(
            (first, second), args.batch_sizes, args.input_len, args.output_len, args.num_turns
        )
    show(paired_table(names, measured))
    rows = [{"what": each.what, "ratio": each.ratio, "seconds": each.seconds} for each in measured]
    write_json(args.output_json, {"implementations": names, "turns": rows})
    return 0


def _measure(args: argparse.Namespace, batch_size: int) -> Budget:
    """Measures the second of two equal batches on a new engine; the first batch has written all pages of the cache."""
    generator = np.random.default_rng(args.engine_args.model.seed)
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len, detokenize=False)
    with (
        tempfile.TemporaryDirectory(prefix="quire-step-") as folder,
        LLM(
            **_options(
                args.engine_args,
                batch_size,
                args.input_len + args.output_len,
                profiler_config={"profiler": "timeline", "torch_profiler_dir": folder},
            )
        ) as llm,
    ):
        for record in (False, True):
            shape = (batch_size, args.input_len)
            prompts = generator.integers(0, llm.config.spec.vocab_size, shape).tolist()
            if record:
                llm.start_profile()
            llm.generate(prompts, params, use_tqdm=False)
        path = llm.stop_profile()
        assert path is not None
        return decode_budget(read_timeline(Path(path)), args.output_len, linear_names(llm.config.spec))


def _options(args: EngineArgs, batch_size: int, num_tokens: int, **others: Any) -> dict[str, Any]:
    """Engine options. Those that the user left open suffice for sequences of `num_tokens`, or are `others`."""
    options = args.flat()
    block_size = args.cache.block_size or DEFAULT_BLOCK_SIZE
    fitting = {
        "max_model_len": num_tokens,
        "max_num_seqs": batch_size,
        # One page more for each request than it fills: the scheduler reserves pages into which requests may grow.
        "num_gpu_blocks_override": batch_size * (-(-num_tokens // block_size) + 1),
        **others,
    }
    return options | {name: value for name, value in fitting.items() if options[name] is None}


def _table(budgets: dict[int, Budget]) -> Table:
    """A table in Markdown, to be pasted into notes."""
    table = Table(title="µs of a decode step, and share", box=box.MARKDOWN)
    table.add_column("part")
    for size in budgets:
        table.add_column(f"batch {size}", justify="right")
        table.add_column("%", justify="right")
    for name, values in table_rows(budgets):
        cells = [(f"{value:,.0f}", f"{100 * value / budgets[size].period:.1f}") for size, value in values.items()]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    return table
