"""`quire bench grammar`: time per token with and without a schema, and the effect of hostile schemas on others."""

import argparse
import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.bench.figures import print_table, write_json
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.flags.ranges import COUNT

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100_000,  # so that no output ends before max_tokens
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string"},
            "color": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "at": {"type": "string", "format": "date-time"},
        },
        "required": ["id", "name", "color", "tags", "at"],
    },
}
BOMBS = (
    {"choice": ["ab" * length for length in range(1, 700)]},  # each choice is a prefix of the next
    {"regex": "(((a|b){1,999}c){1,999}d){1,999}|" * 20 + "e"},  # takes gigabytes
    {"regex": "((([a-z]{1,1000}){1,1000}){1,1000}|x{5000}){1,100}"},  # its masks take very long
)


@dataclass
class Round:
    """Streams that ran at once: seconds between the outputs of each stream, and the number of tokens in them.

    If the client is slower than the engine, one output has several tokens.
    """

    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def per_token(self) -> float:
        return sum(self.gaps) / self.num_tokens


def add_arguments(parser: CommandParser) -> None:
    """Adds this benchmark's own flags, and all engine options."""
    add_engine_options(parser)
    group = parser.add_argument_group("grammar")
    group.add_argument("--num-streams", type=COUNT, default=16, help="Requests at once (default: %(default)s).")
    group.add_argument("--output-len", type=COUNT, default=256, help="Output tokens of each (default: %(default)s).")
    group.add_argument(
        "--num-rounds", type=COUNT, default=5, help="Rounds of each kind, in turn (default: %(default)s)."
    )
    group.add_argument("--backend", default="auto", help="Grammar backend (default: %(default)s).")
    group.add_argument("--output-json", help="File for the figures.")


def run(args: argparse.Namespace) -> int:
    """Measures rounds without and with a schema in turn, then rounds during hostile requests (bombs). Returns the exit
    code."""
    figures = asyncio.run(_measure(args))
    rows = [
        ("Without a schema (ms per token)", f"{figures['plain_ms']:.3f}"),
        ("With a schema (ms per token)", f"{figures['schema_ms']:.3f}"),
        ("Ratio, median of rounds", f"{figures['ratio']:.3f}"),
        ("Longest wait for a token, without bombs (ms)", f"{figures['longest_ms']:.0f}"),
        ("Longest wait for a token, beside bombs (ms)", f"{figures['longest_beside_bombs_ms']:.0f}"),
    ]
    print_table(f"{args.num_streams} streams", rows)
    write_json(args.output_json, figures)
    return 0


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    schema = StructuredOutputsParams(json=SCHEMA, backend=args.backend)
    async with AsyncLLM.from_engine_args(args.engine_args) as llm:

        async def round_of(constraint: StructuredOutputsParams | None) -> Round:
            return await _streams(llm, args, constraint)

        await round_of(None)
        await round_of(schema)  # compiles the grammar
        pairs = [(await round_of(None), await round_of(schema)) for _ in range(args.num_rounds)]
        bombs = [asyncio.create_task(_explode(llm, bomb)) for bomb in BOMBS]
        beside = await round_of(None)
        while not all(bomb.done() for bomb in bombs):
            beside.gaps += (await round_of(None)).gaps
    return {
        "plain_ms": 1000 * float(np.median([plain.per_token for plain, _ in pairs])),
        "schema_ms": 1000 * float(np.median([held.per_token for _, held in pairs])),
        "ratio": float(np.median([held.per_token / plain.per_token for plain, held in pairs])),
        "ratios": [held.per_token / plain.per_token for plain, held in pairs],
        "longest_ms": 1000 * max(max(plain.gaps) for plain, _ in pairs),
        "longest_beside_bombs_ms": 1000 * max(beside.gaps),
    }


async def _streams(llm: AsyncLLM, args: argparse.Namespace, constraint: StructuredOutputsParams | None) -> Round:
    measured = Round()

    async def one(number: int) -> None:
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=args.output_len,
            ignore_eos=constraint is None,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=constraint,
        )
        last = None
        async for output in llm.generate([1, 2, 3, 4 + number], params, f"bench-{number}"):
            now = time.perf_counter()
            if last is not None:
                measured.gaps.append(now - last)
                measured.num_tokens += len(output.outputs[0].token_ids)
            last = now

    await asyncio.gather(*(one(number) for number in range(args.num_streams)))
    return measured


async def _explode(llm: AsyncLLM, bomb: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(**bomb))
    with contextlib.suppress(ParameterError):
        async for _ in llm.generate([1], params, f"bomb-{len(str(bomb))}"):
            pass
