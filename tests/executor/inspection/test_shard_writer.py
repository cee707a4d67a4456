"""Sharded state: each rank reads its own file, and the model is that of the checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.config.quantization import Quantization
from quire.core.errors import ModelLoadError
from quire.executor.inspection import shard_writer
from quire.executor.weights.sharded_state import ShardedWeights, file_name
from quire.frontend.cli.main import QUIRE
from tests.executor.inspection.starts import PROMPTS, config_of, outputs
from tests.executor.paged_driver import Checkpoints

torch.set_num_threads(1)
TOKENIZED = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
OPTIONS = {"max_num_seqs": 4, "max_model_len": 128, "enable_prefix_caching": False}


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("qwen2", {"model_impl": "transformers"})])
def test_outputs_are_those_of_the_checkpoint(
    family: Any, options: dict[str, str], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source, folder = checkpoint(family), tmp_path / "shards"
    shard_writer.save_shards(config_of(source, **options), folder)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "tokenizer.json").is_file()
    assert outputs(folder, load_format="sharded_state", **options) == outputs(source, **options)


def test_every_rank_reads_its_own_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, folder = checkpoint("mixtral", tie=True), tmp_path / "shards"
    flags = ["--output", str(folder), "--tensor-parallel-size", "2", "--quantization", "int8"]
    assert QUIRE.run("quire", ["save-sharded-state", str(source), *flags]) == 0
    options = {"tensor_parallel_size": 2, "quantization": "int8"}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    outputs = []
    for each in (folder, source):
        with LLM(str(each), **OPTIONS, **options) as llm:
            sequences = [output.outputs[0] for output in llm.generate(TOKENIZED, params)]
        outputs.append([(list(each.token_ids), each.cumulative_logprob) for each in sequences])
    assert outputs[0] == outputs[1]


def open_shards(
    folder: Path, rank: int = 0, num_ranks: int = 2, quantization: Quantization | None = None
) -> ShardedWeights:
    return ShardedWeights(folder, torch.float32, quantization, rank, num_ranks)


@pytest.fixture(scope="module")
def shards(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "llama"
    shard_writer.save_shards(config_of(checkpoint("llama"), tensor_parallel_size=2), folder)
    return folder


def test_a_rank_opens_only_its_own_file(shards: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(shards, tmp_path / "shards")
    sizes = [(folder / file_name(rank, 0)).stat().st_size for rank in range(2)]
    assert sum(sizes) < 1.2 * (checkpoint("llama") / "model.safetensors").stat().st_size
    (folder / file_name(1, 0)).unlink()
    open_shards(folder, 0).close()
    with pytest.raises(ModelLoadError, match=r"lacks model-rank-1-part-0.safetensors. Copy all of its files"):
        open_shards(folder, 1)


def test_large_ranks_have_several_files(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "PART_BYTES", 30_000)
    saved = shard_writer.save_shards(config_of(checkpoint("llama")), tmp_path / "shards")
    assert saved.num_files > 3
    weights = open_shards(tmp_path / "shards", 0, 1)
    assert weights.read("model.norm.weight", (64,)).shape == (64,)


def test_other_options_are_refused(shards: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"shards of 2 ranks: start with --tensor-parallel-size 2, or save it"):
        open_shards(shards, 0, 1)
    with pytest.raises(ModelLoadError, match=r"saved with no --quantization, and this start has --quantization int8"):
        open_shards(shards, quantization="int8")
    with pytest.raises(ModelLoadError, match=r"no shard 'model.norm.bias'.*Save it again"):
        open_shards(shards).read("model.norm.bias", (64,))


def test_a_folder_with_files_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").touch()
    assert QUIRE.run("quire", ["save-sharded-state", str(checkpoint("llama")), "--output", str(tmp_path)]) == 1
    assert "holds files already; name a new folder with --output" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_without_a_manifest_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"has no sharded_state.json: write it with `quire save-sharded-state`"):
        open_shards(checkpoint("llama"))
