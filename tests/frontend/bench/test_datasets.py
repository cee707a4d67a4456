"""Datasets: the lengths, prefixes and files that the flags ask for, the same for the same seed."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.choice import add_dataset_arguments, make_requests
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary
from quire.frontend.text.tokenizer import Tokenizer


@pytest.fixture
def vocabulary(checkpoint: Callable[..., Path]) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(checkpoint("llama"))
    return Vocabulary(tokenizer.vocab_size, tokenizer)


def make(vocabulary: Vocabulary, *flags: str, seed: int = 0, as_text: bool = False) -> list[BenchRequest]:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    return make_requests(parser.parse_args(["--num-prompts", "20", *flags]), vocabulary, seed, as_text=as_text)


@pytest.fixture
def conversations(tmp_path: Path) -> str:
    path = tmp_path / "conversations.json"
    turns = [["how are you today my friend?" * (1 + i % 3), "very well, thank you " * (1 + i)] for i in range(5)]
    entries = [{"id": str(i), "conversations": [{"from": "human", "value": v} for v in t]} for i, t in enumerate(turns)]
    path.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}, {"id": "empty"}]))
    return str(path)


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_made_up_requests_repeat_with_their_seed(name: str) -> None:
    ids = Vocabulary(300)
    assert make(ids, "--dataset-name", name, seed=1) == make(ids, "--dataset-name", name, seed=1)
    assert make(ids, "--dataset-name", name, seed=1) != make(ids, "--dataset-name", name, seed=2)


def test_random_lengths_follow_the_range_and_the_shared_prefix() -> None:
    requests = make(
        Vocabulary(300), "--input-len", "50", "--output-len", "10", "--random-range-ratio", "0.2",
        "--random-prefix-len", "7", "--num-prompts", "200",
    )  # fmt: skip
    lengths = {len(request.prompt_token_ids) - 7 for request in requests}
    assert min(lengths) == 40
    assert max(lengths) == 60
    assert {8, 12} <= {request.output_len for request in requests} <= set(range(8, 13))
    assert len({tuple(request.prompt_token_ids[:7]) for request in requests}) == 1


def test_prefixes_are_repeated_and_suffixes_are_not() -> None:
    requests = make(
        Vocabulary(300), "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "30",
        "--prefix-repetition-suffix-len", "20", "--prefix-repetition-num-prefixes", "4",
        "--prefix-repetition-output-len", "9",
    )  # fmt: skip
    prompts = [tuple(request.prompt_token_ids) for request in requests]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({prompt[:30] for prompt in prompts}) == 4
    assert len({prompt[30:] for prompt in prompts}) == 20
    assert {request.output_len for request in requests} == {9}


def test_made_up_texts_tokenize_to_what_is_counted(vocabulary: Vocabulary) -> None:
    for request in make(vocabulary, "--input-len", "50", as_text=True):
        assert vocabulary.encode(request.prompt, add_special_tokens=False) == request.prompt_token_ids
        assert 40 <= len(request.prompt_token_ids) <= 60


def test_conversations_give_prompt_and_length(vocabulary: Vocabulary, conversations: str) -> None:
    flags = ["--dataset-name", "sharegpt", "--dataset-path", conversations]
    ordered = make(vocabulary, *flags, "--disable-shuffle", "--no-oversample")
    assert len(ordered) == 5
    assert ordered[0].prompt == "how are you today my friend?"
    assert ordered[0].prompt_token_ids == vocabulary.encode(ordered[0].prompt)
    assert ordered[1].output_len == len(vocabulary.encode("very well, thank you " * 2, add_special_tokens=False))
    repeated = make(vocabulary, *flags, "--sharegpt-output-len", "3")
    assert len(repeated) == 20
    assert {request.output_len for request in repeated} == {3}
    assert {request.prompt for request in repeated} == {request.prompt for request in ordered}


def test_lines_give_prompts(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 4}\n\n{"prompt": "two"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--no-oversample"]
    requests = make(vocabulary, *flags)
    assert [(request.prompt, request.output_len) for request in requests] == [("one", 256), ("two", 256)]
    with pytest.raises(ConfigError, match="output_tokens"):
        make(vocabulary, *flags, "--custom-output-len", "-1")
    path.write_text('{"prompt": "one", "output_tokens": 4}')
    assert [r.output_len for r in make(vocabulary, *flags, "--custom-output-len", "-1")] == [4]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--random-range-ratio", "1.5"], "--random-range-ratio"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/nowhere.json"], "No such file"),
        (["--dataset-name", "sharegpt", "--dataset-path", __file__], "not a sharegpt file"),
        (["--dataset-name", "custom", "--dataset-path", __file__], "line 1"),
        (["--dataset-name", "prefix_repetition", "--num-prompts", "3"], "--prefix-repetition-num-prefixes 10"),
    ],
)
def test_impossible_datasets_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(Vocabulary(300), *flags)


def test_a_file_needs_a_tokenizer(conversations: str) -> None:
    with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
        make(Vocabulary(300), "--dataset-name", "sharegpt", "--dataset-path", conversations)
