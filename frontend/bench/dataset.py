"""Synthetic requests: random token ids of chosen lengths, the same for the same seed."""

import argparse

import numpy as np
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer


class BenchRequest(Struct):
    """One request to send; `prompt` is empty where token ids are sent as they are."""

    prompt_token_ids: list[int]
    output_len: int
    prompt: str = ""


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags for the random dataset."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=["random"], default="random", help="Kind of requests.")
    group.add_argument("--num-prompts", type=int, default=1000, help="Requests to send (default: %(default)s).")
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
    group.add_argument("--input-len", type=int, help="Shorthand for --random-input-len.")
    group.add_argument("--output-len", type=int, help="Shorthand for --random-output-len.")


def random_requests(
    args: argparse.Namespace, vocab_size: int, seed: int, tokenizer: Tokenizer | None = None
) -> list[BenchRequest]:
    """`args.num_prompts` requests of random ids below `vocab_size`.

    With a tokenizer, prompts are texts that tokenize to about the asked length.
    """
    input_len = args.input_len if args.input_len is not None else args.random_input_len
    output_len = args.output_len if args.output_len is not None else args.random_output_len
    for name, value in (
        ("--num-prompts", args.num_prompts),
        ("input length", input_len),
        ("output length", output_len),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio}.")
    generator = np.random.default_rng(seed)
    input_lens = _lengths(generator, input_len, args.random_range_ratio, args.num_prompts)
    output_lens = _lengths(generator, output_len, args.random_range_ratio, args.num_prompts)
    prefix = generator.integers(0, vocab_size, args.random_prefix_len).tolist()
    requests = []
    for num_input, num_output in zip(input_lens, output_lens, strict=True):
        token_ids = prefix + generator.integers(0, vocab_size, num_input).tolist()
        requests.append(BenchRequest(token_ids, num_output))
    if tokenizer is not None:
        for request in requests:
            _as_text(request, tokenizer)
    return requests


def _lengths(generator: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, round(length * (1 - ratio))), round(length * (1 + ratio))
    return generator.integers(low, high + 1, count).tolist()


def _as_text(request: BenchRequest, tokenizer: Tokenizer) -> None:
    """Random ids decoded to text rarely tokenize back to as many; cutting to length and decoding again settles it."""
    length = len(request.prompt_token_ids)
    for _ in range(3):
        request.prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        token_ids = tokenizer.encode(request.prompt, add_special_tokens=False)
        if len(token_ids) == length:
            break
        request.prompt_token_ids = token_ids[:length]
    request.prompt_token_ids = token_ids
