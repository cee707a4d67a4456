"""`--dataset-name prefix_repetition`: few long prefixes, each before many different suffixes."""

import argparse

import numpy as np

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for this dataset."""
    group = parser.add_argument_group("prefix_repetition dataset")
    for name, default, text in (
        ("prefix-len", 256, "Tokens of each prefix"),
        ("suffix-len", 256, "Tokens after the prefix, different in each prompt"),
        ("num-prefixes", 10, "Different prefixes"),
        ("output-len", 128, "Output tokens"),
    ):
        group.add_argument(
            f"--prefix-repetition-{name}", type=int, default=default, help=f"{text} (default: %(default)s)."
        )


class PrefixRepetitionDataset:
    """The dataset of a few long prefixes, each with many suffixes. Prompts come in shuffled order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._prefix_len = args.prefix_repetition_prefix_len
        self._suffix_len = args.prefix_repetition_suffix_len
        self._num_prefixes = args.prefix_repetition_num_prefixes
        self._output_len = args.output_len if args.output_len is not None else args.prefix_repetition_output_len
        if args.input_len is not None:
            raise ConfigError("--input-len: set --prefix-repetition-prefix-len and --prefix-repetition-suffix-len.")
        if self._num_prefixes < 1 or self._output_len < 1 or self._prefix_len < 0 or self._suffix_len < 0:
            raise ConfigError("--prefix-repetition-num-prefixes and -output-len must be at least 1, the lengths 0.")
        if self._prefix_len + self._suffix_len < 1:
            raise ConfigError("--prefix-repetition-prefix-len and --prefix-repetition-suffix-len leave no prompt.")

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        if num_prompts < self._num_prefixes:
            raise ConfigError(
                f"--num-prompts {num_prompts} is fewer than --prefix-repetition-num-prefixes {self._num_prefixes}."
            )
        generator = np.random.default_rng(seed)

        def tokens(count: int) -> list[int]:
            return generator.integers(0, vocabulary.size, count).tolist()

        prefixes = [tokens(self._prefix_len) for _ in range(self._num_prefixes)]
        requests = [
            BenchRequest(prefixes[index % self._num_prefixes] + tokens(self._suffix_len), self._output_len)
            for index in range(num_prompts)
        ]
        return [requests[index] for index in generator.permutation(num_prompts)]
