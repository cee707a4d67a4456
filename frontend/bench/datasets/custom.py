"""`--dataset-name custom`: prompts from a JSONL file, one `{"prompt": text, "output_tokens": count}` a line."""

import argparse
from pathlib import Path

import numpy as np
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.lines import read_lines
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary


class _Line(Struct):
    prompt: str
    output_tokens: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for this dataset."""
    group = parser.add_argument_group("custom dataset")
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        help="Output tokens (default: %(default)s); -1 takes each line's output_tokens.",
    )


class CustomDataset:
    """The dataset of a JSONL file. Prompts are sent without a template."""

    def __init__(self, args: argparse.Namespace) -> None:
        if not args.dataset_path:
            raise ConfigError("--dataset-name custom needs --dataset-path FILE.jsonl.")
        if args.input_len is not None:
            raise ConfigError("--input-len: prompts of a custom file have the lengths they have; leave it out.")
        self._path = Path(args.dataset_path)
        self._output_len = args.output_len if args.output_len is not None else args.custom_output_len
        if self._output_len < 1 and self._output_len != -1:
            raise ConfigError(f"--custom-output-len must be at least 1, or -1, got {self._output_len}.")
        self._shuffle = not args.disable_shuffle
        self._oversample = not args.no_oversample

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        """The first prompts of the file. Repeats them if there are too few, unless `--no-oversample` is given."""
        lines = read_lines(self._path, _Line, "prompt")
        if self._shuffle:
            lines = [lines[index] for index in np.random.default_rng(seed).permutation(len(lines))]
        requests = [
            BenchRequest(vocabulary.encode(line.prompt), self._length_of(line), line.prompt)
            for line in lines[:num_prompts]
        ]
        if self._oversample:
            requests = [requests[index % len(requests)] for index in range(num_prompts)]
        return requests

    def _length_of(self, line: _Line) -> int:
        if self._output_len != -1:
            return self._output_len
        if line.output_tokens is None or line.output_tokens < 1:
            raise ConfigError(f"--custom-output-len -1 needs a positive output_tokens on each line of {self._path}.")
        return line.output_tokens
