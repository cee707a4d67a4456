"""Weights saved by `torch.save`: whole models, several files, foreign content."""

import copy
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.core.config.load import LoadConfig
from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model
from quire.executor.weights.file_weights import FileWeights
from quire.executor.weights.files import find_files
from quire.executor.weights.names import HubNames
from quire.executor.weights.tensor_files import PickledFile
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec

torch.set_num_threads(1)
MATRIX = torch.arange(24.0).view(6, 4)
TOKENS = list(range(40))


def logits(model: Model) -> torch.Tensor:
    return PagedDriver(model, 1, 64).step({0: TOKENS})[0]


@pytest.fixture
def pickled(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """The tiny Llama, as two pickled files with an index."""
    source = checkpoint("llama")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("load_format", ["auto", "pt", "npcache"])
def test_a_model_of_pickled_files_is_that_of_safetensors(
    load_format: str, pickled: Path, checkpoint: Checkpoints
) -> None:
    expected = logits(load_model(read_spec(checkpoint("llama"))))
    load = LoadConfig(load_format=load_format)  # type: ignore[arg-type]
    assert torch.equal(logits(load_model(read_spec(pickled), load=load)), expected)


def test_files_without_an_index_and_beside_a_trainers_own(pickled: Path, checkpoint: Checkpoints) -> None:
    expected = logits(load_model(read_spec(checkpoint("llama"))))
    (pickled / "pytorch_model.bin.index.json").unlink()
    (pickled / "training_args.bin").write_bytes(b"no tensors")
    (pickled / "optimizer.pt").write_bytes(b"no tensors")
    assert torch.equal(logits(load_model(read_spec(pickled))), expected)


def test_a_missing_file_of_the_index_is_named(pickled: Path) -> None:
    (pickled / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"names pytorch_model-00002-of-00002.bin, which .* lacks"):
        load_model(read_spec(pickled))


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_never_runs(zipped: bool, tmp_path: Path) -> None:
    path, target = tmp_path / "pytorch_model.bin", tmp_path / "was-here"
    torch.save({"a": MATRIX, "b": Payload(target)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin holds more than tensors.*Ask its author for safetens"):
        PickledFile(path)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # so the file was a real attack


def test_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    path, target = tmp_path / "pytorch_model.bin", tmp_path / "was-here"
    path.write_bytes(pickle.dumps({"b": Payload(target)}))
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin"):
        PickledFile(path)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"nothing at all"])
def test_damaged_files_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin (is corrupt or cut short|holds more than tensors)"):
        PickledFile(path)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_state_dict_may_lie_in_a_trainers_file(key: str, tmp_path: Path) -> None:
    torch.save({key: {"layer.weight": MATRIX}, "epoch": 3}, tmp_path / "model.pt")
    assert torch.equal(PickledFile(tmp_path / "model.pt").read("layer.weight", None), MATRIX)


def test_files_of_old_torch_are_read(tmp_path: Path) -> None:
    torch.save({"layer.weight": MATRIX}, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(PickledFile(tmp_path / "model.bin").read("layer.weight", None), MATRIX)


def test_only_what_is_read_takes_memory(tmp_path: Path) -> None:
    """Two ranks map one file: opening it must not copy it into memory."""
    torch.save({f"tensor{i}": torch.ones(8 << 20) for i in range(4)}, tmp_path / "pytorch_model.bin")  # 128 MiB
    before = _anonymous_bytes()
    weights = FileWeights(find_files(tmp_path, "pt"), HubNames(), torch.float32)
    tensor = weights.read("tensor1", (8 << 20,))
    assert _anonymous_bytes() - before < tensor.nbytes + (16 << 20)


def _anonymous_bytes() -> int:
    """Memory of this process that no file is behind."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["RssAnon"].split()[0]) * 1024


def test_packed_archives_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    """A few kilobytes, of which torch.load would make a megabyte; more zeros make gigabytes."""
    torch.save({"layer.weight": MATRIX}, tmp_path / "plain.bin")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in plain.infolist():
            packed.writestr(part.filename, plain.read(part) + bytes(1 << 20) * part.filename.endswith("data.pkl"))
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin is a packed archive.*Ask its author for safetensors"):
        PickledFile(path)


def test_archives_with_overlapping_parts_are_refused(tmp_path: Path) -> None:
    """Each part of such an archive is the same bytes, so that a small file has any number of large ones."""
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data/0", bytes(100_000))
        [first] = archive.filelist
        archive.filelist.extend(copy.copy(first) for _ in range(3))
    with pytest.raises(ModelLoadError, match=r"has parts that are larger than the file"):
        PickledFile(path)
