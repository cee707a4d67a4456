"""Datasets: the lengths, prefixes and files that the flags ask for, the same for the same seed."""

import argparse
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.choice import add_dataset_arguments, make_requests
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary
from quire.frontend.text.tokenizer import Tokenizer
from tests.tiny_whisper import wav


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


RANDOM_MEDIA = ["--dataset-name", "random-mm", "--input-len", "4", "--output-len", "3"]


def test_random_media_are_files_of_the_drawn_sizes() -> None:
    flags = [
        *RANDOM_MEDIA, "--random-mm-base-items-per-request", "3", "--random-mm-num-mm-items-range-ratio", "0.5",
        "--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 1}', "--random-mm-bucket-config",
        "{(24, 16, 1): 1, (16, 32, 1): 1, (32, 16, 5): 8, (999, 999, 1): 0}",
    ]  # fmt: skip
    requests = make(Vocabulary(300), *flags)
    assert requests == make(Vocabulary(300), *flags)
    sizes = set()
    for request in requests:
        assert len(request.prompt_token_ids) == 4
        kinds = [part["type"] for part in request.parts]
        assert kinds.count("video_url") <= 1, "the limit holds, however large the share is"
        for part in request.parts:
            kind = part["type"]
            data = base64.b64decode(part[kind]["url"].partition("base64,")[2])
            if kind == "image_url":
                sizes.add(Image.open(io.BytesIO(data)).size)
                continue
            with av.open(io.BytesIO(data)) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            assert [frame.shape for frame in frames] == [(32, 16, 3)] * 5
    assert sizes == {(16, 24), (32, 16)}, "width and height; a share of 0 is never drawn"
    assert {len(request.parts) for request in requests} == {1, 2, 3, 4}, "3 within a half: from 1 to 5, and 4 at most"


def test_sounds_come_from_a_folder_or_from_lines(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.5), ("b", 1.0), ("c", 2.0)):
        (tmp_path / f"{name}.wav").write_bytes(wav(np.zeros(int(seconds * 16_000), np.float32)))
    (tmp_path / "b.txt").write_text("what b says")
    flags = ["--dataset-name", "custom_audio", "--disable-shuffle", "--no-oversample", "--custom-output-len", "7"]
    found = make(Vocabulary(1), *flags, "--dataset-path", str(tmp_path))
    sounds = [request.sound for request in found]
    assert [(each.name, each.num_seconds, each.text) for each in sounds if each] == [
        ("a.wav", 0.5, None),
        ("b.wav", 1.0, "what b says"),
        ("c.wav", 2.0, None),
    ]
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"audio": "c.wav", "text": "c"}\n\n{"audio": "b.wav", "prompt": "Who?"}\n')
    limits = ["--asr-min-audio-len-sec", "0.7", "--asr-max-audio-len-sec", "1.5"]
    [request] = make(Vocabulary(1), *flags, *limits, "--dataset-path", str(lines))
    assert request.sound is not None
    assert (request.prompt, request.output_len, request.sound.name, request.sound.text) == ("Who?", 7, "b.wav", None)
    lines.write_text('{"audio": "lines.jsonl"}')
    with pytest.raises(ConfigError, match=r"lines.jsonl is no sound file"):
        make(Vocabulary(1), *flags, "--dataset-path", str(lines))


@pytest.mark.parametrize("config", ["{", "{(1, 2): 1}", "{(0, 2, 1): 1}", "{(1, 2, 1): 0}", "{(1, 2, 1): -1}", "[1]"])
def test_impossible_sizes_of_media_are_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make(Vocabulary(300), *RANDOM_MEDIA, "--random-mm-bucket-config", config)
    assert "--random-mm-bucket-config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset-name", "custom_audio"], "--dataset-path"),
        (["--dataset-name", "custom_audio", "--dataset-path", "/nowhere.jsonl"], "No such file"),
        (["--dataset-name", "custom_audio", "--dataset-path", __file__], "line 1"),
        ([*RANDOM_MEDIA, "--random-mm-limit-mm-per-prompt", '{"image": 0}'], "room for 0 items"),
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
