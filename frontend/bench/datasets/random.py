"""`--dataset-name random`: prompts of random token ids, of chosen lengths, with a common prefix."""

import argparse

import numpy as np

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for this dataset."""
    group = parser.add_argument_group("random dataset")
    group.add_argument("--random-input-len", type=int, default=1024, help="Prompt tokens (default: %(default)s).")
    group.add_argument("--random-output-len", type=int, default=128, help="Output tokens (default: %(default)s).")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="Lengths are uniform within this share of the given ones, 0 to below 1 (default: all equal).",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="Tokens of one prefix that all prompts share (default: 0)."
    )


class RandomDataset:
    """The dataset of random token ids."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._input_len = args.input_len if args.input_len is not None else args.random_input_len
        self._output_len = args.output_len if args.output_len is not None else args.random_output_len
        self._range_ratio = args.random_range_ratio
        self._prefix_len = args.random_prefix_len
        for name, value in (("input length", self._input_len), ("output length", self._output_len)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if not 0 <= self._range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), got {self._range_ratio}.")

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        generator = np.random.default_rng(seed)
        input_lens = self._lengths(generator, self._input_len, num_prompts)
        output_lens = self._lengths(generator, self._output_len, num_prompts)
        prefix = generator.integers(0, vocabulary.size, self._prefix_len).tolist()
        return [
            BenchRequest(prefix + generator.integers(0, vocabulary.size, num_input).tolist(), num_output)
            for num_input, num_output in zip(input_lens, output_lens, strict=True)
        ]

    def _lengths(self, generator: np.random.Generator, length: int, count: int) -> list[int]:
        low, high = max(1, round(length * (1 - self._range_ratio))), round(length * (1 + self._range_ratio))
        return generator.integers(low, high + 1, count).tolist()
