"""`quire bench latency`: the seconds that one batch takes offline, from start to end."""

import argparse
import time

import numpy as np

from quire.core.errors import ConfigError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.bench.figures import print_table, write_json
from quire.frontend.bench.profile import add_profile_argument, check_profiler, engine_recording
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.flags.ranges import COUNT, COUNT_OR_NONE
from quire.frontend.llm import LLM
from quire.frontend.progress import open_progress

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: CommandParser) -> None:
    """Adds vLLM's flags, and all engine options."""
    add_engine_options(parser)
    group = parser.add_argument_group("latency")
    group.add_argument("--input-len", type=COUNT, default=32, help="Prompt tokens (default: %(default)s).")
    group.add_argument("--output-len", type=COUNT, default=128, help="Output tokens (default: %(default)s).")
    group.add_argument("--batch-size", type=COUNT, default=8, help="Prompts per batch (default: %(default)s).")
    group.add_argument("--n", type=COUNT, default=1, help="Completions per prompt (default: 1).")
    group.add_argument("--num-iters-warmup", type=COUNT_OR_NONE, default=10, help="Batches before the measurement.")
    group.add_argument("--num-iters", type=COUNT, default=30, help="Batches measured (default: %(default)s).")
    group.add_argument("--disable-detokenize", action="store_true", help="Leave output ids as they are.")
    group.add_argument("--output-json", help="File for the figures.")
    add_profile_argument(group, "one batch after the warm-up, instead of the measurement")


def run(args: argparse.Namespace) -> int:
    """Measures `--num-iters` batches. Returns the exit code."""
    if args.profile:
        check_profiler(args.engine_args)
        if args.output_json:
            raise ConfigError("--profile records one batch and measures none; leave out --output-json.")
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    with LLM(**args.engine_args.flat()) as llm:
        generator = np.random.default_rng(args.engine_args.model.seed)
        vocab_size = llm.config.spec.vocab_size

        def one_batch() -> float:
            # New prompts each time: the prefix cache would have the prompts of a repeated batch.
            tokens = generator.integers(0, vocab_size, (args.batch_size, args.input_len)).tolist()
            started = time.perf_counter()
            llm.generate(tokens, params, use_tqdm=False)
            return time.perf_counter() - started

        for _ in range(args.num_iters_warmup):
            one_batch()
        if args.profile:
            with engine_recording(llm, True):
                one_batch()
            return 0
        seconds = []
        with open_progress("Batches", args.num_iters) as progress:
            for _ in range(args.num_iters):
                seconds.append(one_batch())
                progress.advance(args.batch_size * args.n * args.output_len)
    percentiles = {str(p): float(np.percentile(seconds, p)) for p in PERCENTILES}
    mean = float(np.mean(seconds))
    rows = [("Mean (s)", f"{mean:.4f}"), *((f"P{p} (s)", f"{value:.4f}") for p, value in percentiles.items())]
    print_table("Latency of one batch", rows)
    write_json(args.output_json, {"avg_latency": mean, "latencies": seconds, "percentiles": percentiles})
    return 0
