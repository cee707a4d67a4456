"""Reading checkpoints: slices, dtypes, names, and malformed folders."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quire.core.config.load import LoadConfig
from quire.core.errors import ModelLoadError
from quire.executor.weights.dummy import DummyWeights
from quire.executor.weights.file_weights import FileWeights
from quire.executor.weights.files import find_files
from quire.executor.weights.formats import open_weights
from quire.executor.weights.names import HubNames
from quire.executor.weights.readers import Shard
from tests.executor.paged_driver import Checkpoints, read_spec

MATRIX = torch.arange(24.0).view(6, 4)


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> FileWeights:
    return FileWeights(find_files(folder, "auto"), HubNames(), dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"layer.weight": MATRIX, "layer.bias": MATRIX[0].clone()}, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_tensors_and_slices(folder: Path) -> None:
    weights = open_folder(folder)
    assert torch.equal(weights.read("layer.weight", (6, 4)), MATRIX)
    assert torch.equal(weights.read("layer.weight", (6, 4), Shard(0, 2, 4)), MATRIX[2:4])
    assert torch.equal(weights.read("layer.weight", (6, 4), Shard(1, 1, 3)), MATRIX[:, 1:3])
    assert torch.equal(weights.read("layer.bias", (4,), Shard(0, 3, 4)), MATRIX[0, 3:])


def test_dtype_is_converted(folder: Path) -> None:
    tensor = open_folder(folder, torch.bfloat16).read("layer.weight", (6, 4))
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor.float(), MATRIX)


def test_a_tensor_may_be_read_in_another_dtype_than_the_rest(folder: Path) -> None:
    weights = open_folder(folder, torch.bfloat16)
    tensor = weights.read("layer.weight", (6, 4), Shard(0, 1, 3), torch.float32)
    assert torch.equal(tensor, MATRIX[1:3])
    assert DummyWeights(torch.bfloat16, 0).read("layer.weight", (6, 4), None, torch.float32).dtype == torch.float32


def test_whole_numbers_are_read_as_what_they_are(tmp_path: Path) -> None:
    codes = torch.arange(24, dtype=torch.uint8).view(6, 4)
    save_file({"codes": codes}, tmp_path / "model.safetensors")
    weights = open_folder(tmp_path)
    assert torch.equal(weights.read("codes", (6, 4), None, torch.uint8), codes)
    for dtype in (None, torch.int8):
        with pytest.raises(ModelLoadError, match="holds uint8"):
            weights.read("codes", (6, 4), None, dtype)


def test_a_tensor_outlives_the_reader_and_its_file(folder: Path) -> None:
    weights = open_folder(folder)
    tensor = weights.read("layer.weight", (6, 4))
    tensor += 1
    weights.close()
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(tensor, MATRIX + 1)


def test_several_files_with_and_without_an_index(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = open_folder(checkpoint("llama"))
    folder = tmp_path / "shards"
    shutil.copytree(checkpoint("llama", safetensors_shards=3), folder)
    name, shape = "model.layers.1.mlp.down_proj.weight", (64, 96)
    expected = whole.read(name, shape)
    assert torch.equal(open_folder(folder).read(name, shape), expected)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(open_folder(folder).read(name, shape), expected)


def test_missing_tensor_names_its_neighbours(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tensor 'layer.weights'.*Nearest names: layer.weight"):
        open_folder(folder).read("layer.weights", (6, 4))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"layer.weight": MATRIX.to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"layer\.weight.*holds int8, where float32 is expected: does config.json lack"
    ):
        open_folder(tmp_path).read("layer.weight", (6, 4))


def test_wrong_shape_names_both(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"layer.weight.*\[6, 4\].*\[6, 5\]"):
        open_folder(folder).read("layer.weight", (6, 5))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"\xff" * 64])
def test_corrupt_header_names_the_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model.safetensors is corrupt or cut short"):
        open_folder(folder)


def test_truncated_file_names_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match=r"model.safetensors is corrupt or cut short"):
        open_folder(folder)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no weights"):
        find_files(tmp_path, "auto")


def test_other_formats_are_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"only model.gguf: drop --load-format, or serve that file by its path"):
        find_files(tmp_path, "auto")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"\*\.safetensors\), but others: drop --load-format safetensors"):
        find_files(tmp_path, "safetensors")


@pytest.fixture
def shards(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A copy of a checkpoint in two files, which a test may change."""
    return Path(shutil.copytree(checkpoint("llama", safetensors_shards=2), tmp_path / "shards"))


def change_index(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    path.write_text(json.dumps({**index, "weight_map": change(index["weight_map"])}))


def other_shards(listed: dict[str, str]) -> dict[str, str]:
    first, second = sorted(set(listed.values()))
    return {name: second if file == first else first for name, file in listed.items()}


def half(listed: dict[str, str]) -> dict[str, str]:
    """Without half of the names, and with both files."""
    names = sorted(listed)
    kept = {name: listed[name] for name in names[::2]}
    return kept if len(set(kept.values())) == 2 else {name: listed[name] for name in [*names[::2], names[1]]}


def more(listed: dict[str, str]) -> dict[str, str]:
    return {**listed, "model.layers.9.norm.weight": next(iter(listed.values()))}


INDICES = {"in-other-shards": other_shards, "not-all-names": half, "names-of-nothing": more}


@pytest.mark.parametrize("name", INDICES)
def test_the_files_decide_and_not_the_index(name: str, shards: Path) -> None:
    expected = open_folder(shards)
    change_index(shards, INDICES[name])
    library = AutoModelForCausalLM.from_pretrained(shards).state_dict()
    weights = open_folder(shards)
    assert set(weights.shapes) == set(expected.shapes) == set(library)
    for tensor, shape in expected.shapes.items():
        assert torch.equal(weights.read(tensor, shape), library[tensor])


def test_a_whole_file_counts_and_not_the_index_beside_it(shards: Path, checkpoint: Checkpoints) -> None:
    """As left behind by a trainer that saved again in one file."""
    shutil.copy(checkpoint("llama", seed=1) / "model.safetensors", shards)
    name, shape = "model.norm.weight", (64,)
    expected = AutoModelForCausalLM.from_pretrained(shards).get_parameter(name)
    for _ in range(2):
        assert torch.equal(open_folder(shards).read(name, shape), expected)
        (shards / "model-00002-of-00002.safetensors").unlink(missing_ok=True)  # nor the files that it names


def test_pickled_weights_beside_an_adapter(folder: Path) -> None:
    """And beside whatever else has a name of its own."""
    (folder / "model.safetensors").unlink()
    torch.save({"layer.weight": MATRIX}, folder / "pytorch_model.bin")
    for name in ("adapter_model.safetensors", "embeddings.safetensors"):
        save_file({"layer.weight": MATRIX + 1}, folder / name)
    assert torch.equal(open_folder(folder).read("layer.weight", (6, 4)), MATRIX)


def test_an_adapter_alone_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=r"only an adapter \(adapter_model.safetensors\): merge it into its base"):
        find_files(folder, "auto")


def test_index_that_names_an_absent_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"layer.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002.safetensors.*Finish the download; or remove the"):
        find_files(folder, "auto")


def test_a_missing_tensor_that_the_index_has(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"layer.scale": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"00001.safetensors lacks tensor 'layer.scale', which .*index.json says"):
        open_folder(folder).read("layer.scale", (4,))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_broken_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"not an index of weights|Cannot read .*index.json"):
        find_files(folder, "auto")


def test_an_index_reads_files_of_its_own_folder_alone(folder: Path) -> None:
    secret = folder.parent / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(secret)
    for name in (str(secret), f"../{secret.name}", f"x/../../{secret.name}", f"{secret.name}\0"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer.weight": name}}))
        with pytest.raises(ModelLoadError, match=r"index.json names .*, which is no file in .*from somebody you trust"):
            find_files(folder, "auto")
    inner = folder / "shards" / secret.name
    inner.parent.mkdir()
    secret.rename(inner)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"layer.weight": f"shards/{inner.name}"}})
    )
    assert find_files(folder, "auto").paths == [inner]


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


@pytest.mark.parametrize(
    "stored", ["norm.weight", "language_model.model.norm.weight", "model.language_model.norm.weight"]
)
def test_a_checkpoint_may_have_another_prefix(stored: str, tmp_path: Path) -> None:
    save_file({stored: MATRIX, "norm.weights": MATRIX[0].clone()}, tmp_path / "model.safetensors")
    assert torch.equal(open_folder(tmp_path).read("model.norm.weight", (6, 4)), MATRIX)


def test_exact_names_come_first(tmp_path: Path) -> None:
    save_file({"norm.weight": MATRIX + 1, "transformer.norm.weight": MATRIX}, tmp_path / "model.safetensors")
    assert torch.equal(open_folder(tmp_path).read("transformer.norm.weight", (6, 4)), MATRIX)


def test_a_tensor_is_contiguous_however_it_is_stored(tmp_path: Path) -> None:
    torch.save({"layer.weight": MATRIX.t()}, tmp_path / "pytorch_model.bin")
    tensor = open_folder(tmp_path).read("layer.weight", (4, 6))
    assert tensor.is_contiguous()
    assert torch.equal(tensor, MATRIX.t())
