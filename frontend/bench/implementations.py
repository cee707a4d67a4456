"""Times the implementations of one model in turns: `quire bench step --against`."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.llm import LLM

_FEW_TOKENS = 4


class PairedTimes(NamedTuple):
    """Times of two engines that were measured alternately, in seconds.

    Attributes:
        what: a prompt, or a step of some requests.
        seconds: of both engines, turn by turn.
    """

    what: str
    seconds: list[tuple[float, float]]

    @property
    def least(self) -> tuple[float, float]:
        """The least time of each engine."""
        first, second = zip(*self.seconds, strict=True)
        return min(first), min(second)

    @property
    def ratio(self) -> float:
        """The median of the second engine's times by the first one's: what else the machine does moves it less."""
        return statistics.median(second / first for first, second in self.seconds)


def measure_alternating(
    engines: tuple[LLM, LLM], batch_sizes: Sequence[int], input_len: int, output_len: int, num_turns: int
) -> list[PairedTimes]:
    """Times a prompt of `input_len` tokens, and steps in which each number of requests decodes after a few tokens."""

    def decode(llm: LLM, batch_size: int) -> float:
        whole = _seconds(llm, batch_size, _FEW_TOKENS, output_len)
        return (whole - _seconds(llm, batch_size, _FEW_TOKENS, 1)) / (output_len - 1)

    def measure(what: str, seconds: Callable[[LLM], float]) -> PairedTimes:
        turns = []
        for turn in range(num_turns + 1):  # the first one warms up
            order = 1 - 2 * (turn % 2)
            first, second = [seconds(llm) for llm in engines[::order]][::order]
            turns.append((first, second))
        return PairedTimes(what, turns[1:])

    prompt = measure(f"a prompt of {input_len} tokens", lambda llm: _seconds(llm, 1, input_len, 1))
    steps = [measure(f"a step of {size}", lambda llm, size=size: decode(llm, size)) for size in batch_sizes]  # type: ignore[misc]
    return [prompt, *steps]


def paired_table(names: tuple[str, str], measured: Sequence[PairedTimes]) -> Table:
    """A table in Markdown, to be pasted into notes."""
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for name in (*(f"{name}, ms" for name in names), "median ratio of the turns"):
        table.add_column(name, justify="right")
    for turns in measured:
        table.add_row(turns.what, *(f"{1000 * least:,.2f}" for least in turns.least), f"{turns.ratio:.3f} ×")
    return table


def _seconds(llm: LLM, batch_size: int, input_len: int, output_len: int) -> float:
    """Seconds of a batch of prompts, each with `output_len` tokens of output."""
    generator = np.random.default_rng(batch_size)
    prompts = generator.integers(0, llm.config.spec.vocab_size, (batch_size, input_len)).tolist()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin
