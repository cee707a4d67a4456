"""Reading checkpoints: slices, dtypes, and malformed folders."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.core.config.load import LoadConfig
from quire.core.errors import ModelLoadError
from quire.executor.weights.readers import DummyWeights, SafetensorsWeights, Shard, checkpoint_files, open_weights
from tests.executor.paged_driver import Checkpoints, read_spec

MATRIX = torch.arange(24.0).view(6, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"layer.weight": MATRIX, "layer.bias": MATRIX[0].clone()}, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_tensors_and_slices(folder: Path) -> None:
    weights = SafetensorsWeights(folder, torch.float32)
    assert torch.equal(weights.read("layer.weight", (6, 4)), MATRIX)
    assert torch.equal(weights.read("layer.weight", (6, 4), Shard(0, 2, 4)), MATRIX[2:4])
    assert torch.equal(weights.read("layer.weight", (6, 4), Shard(1, 1, 3)), MATRIX[:, 1:3])
    assert torch.equal(weights.read("layer.bias", (4,), Shard(0, 3, 4)), MATRIX[0, 3:])


def test_dtype_is_converted(folder: Path) -> None:
    tensor = SafetensorsWeights(folder, torch.bfloat16).read("layer.weight", (6, 4))
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor.float(), MATRIX)


def test_a_tensor_may_be_read_in_another_dtype_than_the_rest(folder: Path) -> None:
    weights = SafetensorsWeights(folder, torch.bfloat16)
    tensor = weights.read("layer.weight", (6, 4), Shard(0, 1, 3), torch.float32)
    assert torch.equal(tensor, MATRIX[1:3])
    assert DummyWeights(torch.bfloat16, 0).read("layer.weight", (6, 4), None, torch.float32).dtype == torch.float32


def test_whole_numbers_are_read_as_what_they_are(tmp_path: Path) -> None:
    codes = torch.arange(24, dtype=torch.uint8).view(6, 4)
    save_file({"codes": codes}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, torch.float32)
    assert torch.equal(weights.read("codes", (6, 4), None, torch.uint8), codes)
    for dtype in (None, torch.int8):
        with pytest.raises(ModelLoadError, match="holds uint8"):
            weights.read("codes", (6, 4), None, dtype)


def test_a_tensor_outlives_the_reader_and_its_file(folder: Path) -> None:
    weights = SafetensorsWeights(folder, torch.float32)
    tensor = weights.read("layer.weight", (6, 4))
    tensor += 1
    weights.close()
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(tensor, MATRIX + 1)


def test_several_files_with_and_without_an_index(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = SafetensorsWeights(checkpoint("llama"), torch.float32)
    folder = tmp_path / "shards"
    shutil.copytree(checkpoint("llama", safetensors_shards=3), folder)
    name, shape = "model.layers.1.mlp.down_proj.weight", (64, 96)
    expected = whole.read(name, shape)
    assert torch.equal(SafetensorsWeights(folder, torch.float32).read(name, shape), expected)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(SafetensorsWeights(folder, torch.float32).read(name, shape), expected)


def test_missing_tensor_names_its_neighbours(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tensor 'layer.weights'.*Nearest names: layer.weight"):
        SafetensorsWeights(folder, torch.float32).read("layer.weights", (6, 4))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"layer.weight": MATRIX.to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layer\.weight.*int8.*quantised"):
        SafetensorsWeights(tmp_path, torch.float32).read("layer.weight", (6, 4))


def test_wrong_shape_names_both(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"layer.weight.*\[6, 4\].*\[6, 5\]"):
        SafetensorsWeights(folder, torch.float32).read("layer.weight", (6, 5))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"\xff" * 64])
def test_corrupt_header_names_the_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model.safetensors is corrupt or cut short"):
        SafetensorsWeights(folder, torch.float32)


def test_truncated_file_names_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match=r"model.safetensors is corrupt or cut short"):
        SafetensorsWeights(folder, torch.float32)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no weights"):
        checkpoint_files(tmp_path)


def test_other_formats_are_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"only pytorch_model.bin: convert it"):
        checkpoint_files(tmp_path)


def test_index_that_names_an_absent_file(folder: Path) -> None:
    index = {"weight_map": {"layer.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002.safetensors.*Finish the download"):
        checkpoint_files(folder)


def test_index_that_names_an_absent_tensor(folder: Path) -> None:
    index = {"weight_map": {"layer.scale": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks tensor 'layer.scale'"):
        SafetensorsWeights(folder, torch.float32)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_broken_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"not a safetensors index"):
        checkpoint_files(folder)


def test_dummy_weights_are_seeded_and_slice_alike() -> None:
    shape = (1500, 1100)  # more than one period of the random block
    whole = DummyWeights(torch.float32, 1).read("a.weight", shape)
    again = DummyWeights(torch.float32, 1)
    assert torch.equal(again.read("a.weight", shape, Shard(0, 1200, 1500)), whole[1200:])
    assert torch.equal(again.read("a.weight", shape, Shard(1, 7, 500)), whole[:, 7:500])
    assert not torch.equal(again.read("b.weight", shape), whole)
    assert not torch.equal(DummyWeights(torch.float32, 2).read("a.weight", shape), whole)
    assert whole.std() == pytest.approx(shape[1] ** -0.5, rel=0.01)
    assert torch.equal(again.read("input_layernorm.weight", (5,)), torch.ones(5))
    assert torch.equal(again.read("q_proj.bias", (5,), Shard(0, 2, 4)), torch.zeros(2))


def test_progress_is_drawn_on_a_terminal_only(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(checkpoint("llama"))
    for is_terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda value=is_terminal: value)
        monkeypatch.setattr(sys, "stderr", stream)
        weights = open_weights(spec, LoadConfig(), torch.float32, show_progress=True)
        weights.read("model.norm.weight", (64,))
        weights.close()
        assert ("Loading weights" in stream.getvalue()) == is_terminal
