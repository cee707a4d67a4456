"""`quire replay` on the recording of a real engine: the same weights bring the same tokens, and others do not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.core.flight.records import HEAD, Kind, read_preamble, read_records
from quire.core.wire.protocol import encoder
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.cli import replay
from quire.frontend.cli.doctor import lines
from quire.frontend.flags.parser import CommandParser

PROMPTS = [[5, 6, 7, 8] * 10, [5, 6, 7, 8] * 10 + [9], [3, 4]]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flight")
    llm = LLM(str(checkpoint("llama")), device="cpu", num_gpu_blocks_override=64, flight_recorder=str(folder))
    fields = {"max_tokens": 12, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0, **fields),
        SamplingParams(temperature=1, seed=3, n=2, **fields),
        SamplingParams(temperature=1, seed=3, structured_outputs=StructuredOutputsParams(regex="[0-9]{30}"), **fields),
    ]
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    for kind in kinds:
        llm.generate(prompts, [kind] * 3, use_tqdm=False)
    del llm
    return folder


def run(*words: str) -> int:
    parser = CommandParser("quire replay", "")
    replay.add_arguments(parser)
    return replay.run(parser.parse_args(list(words)))


def test_the_same_weights_bring_the_same_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["difference"] is None
    assert report["num_tokens"] == 12 * (3 + 6 + 3)
    assert report["num_left_out"] == 0


def test_other_weights_are_found_at_the_first_token(
    folder: Path, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(folder), "--model", str(checkpoint("llama", seed=7))) == replay.DIFFERS
    said = capsys.readouterr().out
    assert "Step 0 differs" in said
    assert "token 40: recorded [" in said


def test_the_end_of_a_recording_runs_without_its_beginning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [file] = folder.iterdir()
    data = file.read_bytes()
    preamble = read_preamble(data)
    assert preamble is not None
    preamble.sequence = 5
    first = encoder().encode(preamble)
    records = [each for each in read_records(data) if each.kind is not Kind.PREAMBLE]
    with (tmp_path / file.name).open("wb") as part:
        part.write(HEAD.pack(len(first), Kind.PREAMBLE, preamble.monotonic) + first)
        part.writelines(HEAD.pack(len(each.payload), each.kind, each.time) + each.payload for each in records[8:])
    assert run(str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_left_out"] > 0
    assert report["num_tokens"] == 12 * 3  # of the prompt without a prefix in the cache
    assert report["difference"] is None


def test_doctor_says_what_the_engine_did(folder: Path) -> None:
    said = "\n".join(lines([str(folder)]))
    assert "requests: 12 came, 0 were aborted; ended: 12 length" in said
    assert "144 tokens" in said
    assert "recorded: its whole life" in said


def test_a_folder_without_weights_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with the weights; name another with --model"):
        run(str(folder), "--model", str(tmp_path / "gone"))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with pytest.raises(ConfigError, match="--engine must be from 0 to 0"):
        run(str(copy), "--engine", "1")
