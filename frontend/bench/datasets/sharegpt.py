"""`--dataset-name sharegpt`: the first exchange of each conversation in a ShareGPT-style JSON file.

The file is a list of `{"conversations": [{"value": question}, {"value": answer}, ...]}`. The output has the answer's
length, unless `--sharegpt-output-len` is set.
"""

import argparse
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary

# The same limits as vLLM's, so that figures on one file can be compared.
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 2048


class _Turn(Struct):
    value: str


class _Conversation(Struct):
    conversations: list[_Turn] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for this dataset."""
    group = parser.add_argument_group("sharegpt dataset")
    group.add_argument("--sharegpt-output-len", type=int, help="Output tokens (default: the answers' lengths).")


class ShareGptDataset:
    """The dataset of a ShareGPT-style file."""

    def __init__(self, args: argparse.Namespace) -> None:
        if not args.dataset_path:
            raise ConfigError("--dataset-name sharegpt needs --dataset-path FILE.json.")
        if args.input_len is not None:
            raise ConfigError("--input-len: prompts of a sharegpt file have the lengths they have; leave it out.")
        self._path = Path(args.dataset_path)
        self._output_len = args.output_len if args.output_len is not None else args.sharegpt_output_len
        if self._output_len is not None and self._output_len < 1:
            raise ConfigError(f"--sharegpt-output-len must be at least 1, got {self._output_len}.")
        self._shuffle = not args.disable_shuffle
        self._oversample = not args.no_oversample

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        """The first exchange of each conversation. Repeats them if there are too few, unless `--no-oversample` is
        given."""
        conversations = self._read()
        if self._shuffle:
            order = np.random.default_rng(seed).permutation(len(conversations))
            conversations = [conversations[index] for index in order]
        requests: list[BenchRequest] = []
        for question, answer in conversations:
            if len(requests) == num_prompts:
                break
            prompt_token_ids = vocabulary.encode(question)
            output_len = self._output_len or len(vocabulary.encode(answer, add_special_tokens=False))
            if self._fits(len(prompt_token_ids), output_len):
                requests.append(BenchRequest(prompt_token_ids, output_len, question))
        if not requests:
            raise ConfigError(f"--dataset-path {self._path}: no conversation has an exchange of usable length.")
        if self._oversample:
            requests = [requests[index % len(requests)] for index in range(num_prompts)]
        return requests

    def _fits(self, num_input: int, num_output: int) -> bool:
        if num_input < MIN_TOKENS or (self._output_len is None and num_output < MIN_TOKENS):
            return False
        return num_input <= MAX_PROMPT_TOKENS and num_input + num_output <= MAX_TOKENS

    def _read(self) -> list[tuple[str, str]]:
        try:
            entries = msgspec.json.decode(self._path.read_bytes(), type=list[_Conversation])
        except OSError as error:
            raise ConfigError(f"--dataset-path {self._path}: {error.strerror}.") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset-path {self._path} is not a sharegpt file: {error}.") from None
        return [
            (entry.conversations[0].value, entry.conversations[1].value)
            for entry in entries
            if len(entry.conversations) >= 2
        ]
