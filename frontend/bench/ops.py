"""`quire bench ops`: the CPU kernels' times, as ratios to the least that reading and multiplying can take."""

import argparse
import sys
from collections.abc import Iterator

import msgspec
from rich import box
from rich.table import Table

from quire.core.errors import ConfigError
from quire.core.wire.inspection import LayerShape, OpsQuestion, OpsTimed, OpTiming
from quire.frontend.bench.tables import show
from quire.frontend.flags.parser import CommandParser
from quire.frontend.flags.ranges import COUNT, Number
from quire.frontend.launch.inspection import time_ops

OPERATIONS = "linear,attention,prefill,latent,compressed,experts"
DTYPES = (
    "bf16,fp16,fp32,int8,fp8,fp8_e5m2,fp8_block,mxfp8,int4,int4_g64,int4_g128,int4_zero,nf4,fp4,nvfp4,"
    "q8_0,q6_k,q5_k,q4_k,q3_k,q2_k"
)
_SHAPE = msgspec.structs.fields(LayerShape)


def add_arguments(parser: CommandParser) -> None:
    """Adds this benchmark's flags; vLLM has no such benchmark."""
    group = parser.add_argument_group("ops")
    group.add_argument(
        "--ops", type=_names, default=OPERATIONS, metavar="NAMES",
        help="What to time, separated by commas: the linear layers of a decoder layer, the attention of a decode step "
        "(rows are requests) or of a prompt (rows are tokens), that of a decode step to latents, or to a window and "
        "chosen rows for several tokens each, a layer of experts (default: %(default)s).",
    )  # fmt: skip
    group.add_argument(
        "--dtypes", type=_names, default=DTYPES, metavar="NAMES",
        help="Formats of the weights, of which the last six are those of GGUF files, or of keys, values and latents, "
        "which have bf16, fp16, fp32, int8, fp8 and int4 alone (default: %(default)s).",
    )  # fmt: skip
    group.add_argument("--rows", type=_numbers, default="1,8,32,512", metavar="NUMBERS", help="(default: %(default)s)")
    group.add_argument(
        "--isa", type=_names, default=[], metavar="NAMES",
        help="Levels of instructions as in QUIRE_CPU_ISA, or `all` (default: the processor's best).",
    )  # fmt: skip
    group.add_argument("--threads", type=COUNT, help="Threads (default: one a core).")
    group.add_argument(
        "--seconds", type=Number(float, 0), default=0.5, help="For each cell of the grid (default: %(default)s)."
    )
    group.add_argument("--json", action="store_true", help="Print one JSON object.")
    for field in _SHAPE:
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, type=COUNT, default=field.default, help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Times the grid at each level. Returns the exit code."""
    shape = LayerShape(**{field.name: getattr(args, field.name) for field in _SHAPE})
    if shape.num_heads % shape.num_kv_heads or shape.top_k > shape.num_experts:
        raise ConfigError("--num-heads must be a multiple of --num-kv-heads, and --top-k at most --num-experts.")
    question = OpsQuestion(shape, args.ops, args.dtypes, args.rows, args.seconds, args.threads)
    levels = []
    for timed in _by_level(question, args.isa):
        levels.append(timed)
        if not args.json:
            print(_heading(timed))
            show(_table(timed))
            print(flush=True)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(as_json(shape, levels))).decode() + "\n")
    return 0


def _by_level(question: OpsQuestion, asked: list[str]) -> Iterator[OpsTimed]:
    """The timings of each level, each from a separate process."""
    if asked not in ([], ["all"]):
        for isa in asked:
            try:
                yield time_ops(question, isa)
            except ConfigError as error:
                raise ConfigError(f"--isa {isa}: {error}") from None
        return
    best = time_ops(question, None)
    yield best
    if asked:
        yield from (time_ops(question, isa) for isa in best.available if isa != best.isa)


def as_json(shape: LayerShape, levels: list[OpsTimed]) -> dict[str, object]:
    """All figures under plain names; seconds, bytes, and the ratios of times to floors."""
    return {
        "shape": msgspec.structs.asdict(shape),
        "levels": [
            {
                "isa": timed.isa,
                "num_threads": timed.num_threads,
                "bytes_per_second": timed.bytes_per_second,
                "operations_per_second": timed.operations_per_second,
                "timings": [msgspec.structs.asdict(each) | {"ratio": ratio(each)} for each in timed.timings],
            }
            for timed in levels
        ],
    }


def ratio(timing: OpTiming) -> float:
    """The time by its floor, the longer of reading and multiplying."""
    return timing.best_s / max(timing.read_s, timing.multiply_s)


def _heading(timed: OpsTimed) -> str:
    peaks = ", ".join(f"{name} {speed / 1e9:.0f}" for name, speed in timed.operations_per_second.items())
    return (
        f"{timed.isa}, {timed.num_threads} threads: reads {timed.bytes_per_second / 1e9:.1f} GB/s, multiplies {peaks} "
        "GFLOP/s.\nMilliseconds, and their ratio to the floor (r: reading, m: multiplying)."
    )


def _table(timed: OpsTimed) -> Table:
    """A table in Markdown, to be pasted into notes: a line for each operation and dtype."""
    table = Table(box=box.MARKDOWN)
    table.add_column("operation")
    table.add_column("dtype")
    counts = sorted({timing.rows for timing in timed.timings})
    for count in counts:
        table.add_column(f"{count} rows" if count > 1 else "1 row", justify="right")
    cells = {(timing.operation, timing.dtype, timing.rows): timing for timing in timed.timings}
    for operation, dtype in dict.fromkeys((timing.operation, timing.dtype) for timing in timed.timings):
        line = (cells.get((operation, dtype, count)) for count in counts)
        table.add_row(operation, dtype, *("" if timing is None else _cell(timing) for timing in line))
    return table


def _cell(timing: OpTiming) -> str:
    bound = "r" if timing.read_s > timing.multiply_s else "m"
    return f"{timing.best_s * 1e3:.2f} ({ratio(timing):.2f} {bound})"


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(COUNT(number)) for number in text.split(",")]
