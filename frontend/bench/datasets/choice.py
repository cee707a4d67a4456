"""`--dataset-name`, and the flags of all datasets."""

import argparse
from collections.abc import Callable

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets import custom, prefix_repetition, random, random_media, sharegpt, sounds
from quire.frontend.bench.datasets.request import BenchRequest, Dataset, Vocabulary, write_as_text

DATASETS: dict[str, Callable[[argparse.Namespace], Dataset]] = {
    "random": random.RandomDataset,
    "random-mm": random_media.RandomMediaDataset,
    "prefix_repetition": prefix_repetition.PrefixRepetitionDataset,
    "sharegpt": sharegpt.ShareGptDataset,
    "custom": custom.CustomDataset,
    "custom_audio": sounds.SoundDataset,
}


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags for the datasets that need no download."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=list(DATASETS), default="random", help="Kind of requests.")
    group.add_argument("--dataset-path", help="The file of a dataset, or a folder of sounds.")
    group.add_argument("--num-prompts", type=int, default=1000, help="Requests to send (default: %(default)s).")
    group.add_argument("--input-len", type=int, help="Shorthand for --random-input-len.")
    group.add_argument("--output-len", type=int, help="Shorthand for the dataset's own output length.")
    group.add_argument("--disable-shuffle", action="store_true", help="Keep a file's order.")
    group.add_argument("--no-oversample", action="store_true", help="Send fewer requests rather than some twice.")
    for module in (random, random_media, prefix_repetition, sharegpt, custom, sounds):
        module.add_arguments(parser)


def make_requests(args: argparse.Namespace, vocabulary: Vocabulary, seed: int, *, as_text: bool) -> list[BenchRequest]:
    """The requests that the flags ask for.

    Args:
        as_text: every request gets a `prompt` that a server tokenizes to the request's ids; the vocabulary must have a
            tokenizer. Otherwise generated requests have only ids.

    Raises:
        ConfigError: a flag or the dataset's file cannot be used.
    """
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}.")
    requests = DATASETS[args.dataset_name](args).requests(args.num_prompts, vocabulary, seed)
    if as_text and vocabulary.tokenizer is not None:
        for request in requests:
            if not request.prompt:
                write_as_text(request, vocabulary.tokenizer)
    return requests


def check_text_only(requests: list[BenchRequest], what: str) -> None:
    """Raises ConfigError if a request has more than text; `what` takes no more."""
    if any(request.has_media for request in requests):
        raise ConfigError(f"{what} sends texts alone; images and sounds need quire bench serve --backend openai-chat.")
