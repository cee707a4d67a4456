"""Damaged tensors and configurations in every format: right numbers, or an error that says what is wrong."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.file_weights import FileWeights
from quire.executor.weights.files import WeightFiles
from quire.executor.weights.names import HubNames
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.formats.by_name import canonical, read_format
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from tests.executor.weights.stored_formats import Format
from tests.executor.weights.test_quantized_checkpoints import FORMATS

torch.set_num_threads(1)

OUT, IN, NAME = 64, 128, "model.layers.0.mlp.up_proj"

OPTIONAL = ("pre_quant_scale", "_weight_act_pre_scale", "svdquant_lora_a", "svdquant_lora_b")
"""Ends of names of tensors that a layer may have or not, which nothing tells."""

OLDER = [("ct-w3-group", "weight_packed", "one more in 1")]
"""As older versions of a format have a tensor: other numbers, which nothing tells."""

VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 48, 2**70, 1.5, float("nan"), "x", "", [], {}, [1], [[1]], ["x", 3], [0, 0]),
    *({"a": 1}, {"a": {"b": [1]}}, "re:("),
]


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint with the layer's tensors."""
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)  # writing over a file waits for the disk
    save_file({f"{NAME}.{kind}": each.contiguous() for kind, each in tensors.items()}, path)
    return path


def read(path: Path, config: dict[str, Any]) -> Tensor:
    """The layer's numbers."""
    source = FileWeights(WeightFiles([path]), HubNames(), torch.float32)
    try:
        scheme = read_format(canonical(str(config.get("quant_method"))), config, torch.float32)
        return sharding.dequantized(
            scheme.read_weight(source, LinearPart(NAME, OUT, Shard(0, 0, OUT)), IN), torch.float32
        )
    finally:
        source.close()


def attempt(path: Path, config: dict[str, Any]) -> Tensor | str:
    """See `read`; or the message of the error."""
    try:
        return read(path, config)
    except ModelLoadError as error:
        return str(error)


def one_more(tensor: Tensor, dim: int) -> Tensor:
    numbers = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return torch.cat((numbers, numbers.narrow(dim, 0, 1)), dim).view(tensor.dtype)


def damages(tensor: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1:
            yield f"one less in {dim}", lambda dim=dim: tensor.narrow(dim, 0, tensor.shape[dim] - 1)
        yield f"one more in {dim}", lambda dim=dim: one_more(tensor, dim)
        yield f"none in {dim}", lambda dim=dim: tensor.narrow(dim, 0, 0)
    yield "flat", tensor.flatten
    yield "of one dimension more", lambda: tensor.unsqueeze(-1)
    yield "whole numbers", lambda: tensor.float().to(torch.int64)
    yield "other bytes", lambda: tensor.contiguous().flatten().view(torch.uint8)
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel():
        first = torch.tensor([0])
        for number in (float("nan"), float("inf")):
            yield f"with {number}", lambda number=number: tensor.flatten().index_fill(0, first, number).view_as(tensor)


def is_the_same(numbers: Tensor, expected: Tensor) -> bool:
    return numbers.shape == expected.shape and torch.allclose(numbers, expected, atol=1e-5)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_tensor_is_told_by_its_name(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    tensors, expected = form.write(OUT, IN, torch.Generator().manual_seed(0))
    assert is_the_same(read(write(tmp_path, tensors), form.config), expected)
    for kind, tensor in tensors.items():
        lost = {other: each for other, each in tensors.items() if other != kind}
        variants = {what: lost | {kind: change()} for what, change in damages(tensor)}
        if not kind.endswith(OPTIONAL):
            variants["lost"] = lost
        for what, damaged in variants.items():
            found = attempt(write(tmp_path, damaged), form.config)
            if (name, kind, what) in OLDER:
                continue
            if isinstance(found, str):
                assert NAME in found, (kind, what)
            else:
                assert is_the_same(found, expected), f"other numbers, where {kind} is {what}"


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_configuration_is_refused_or_read(name: str, tmp_path: Path) -> None:
    """A field may have another value, with which numbers are others. No field's value is an accident."""
    form, random_value = FORMATS[name], random.Random(name)
    tensors, _ = form.write(OUT, IN, torch.Generator().manual_seed(0))
    path = write(tmp_path, tensors)
    for field in fields(form.config):
        for value in random_value.sample(VALUES, 3):
            config = with_value(form, field, value)
            found = attempt(path, config)
            if isinstance(found, str):
                assert len(found) > 30, (field, value)
            else:
                assert found.shape == (OUT, IN), (field, value)
                assert found.isfinite().all(), (field, value)


def fields(value: Any, outer: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the fields of a configuration are, but for the one that names its format."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if key != "quant_method":
            yield (*outer, key)
            yield from fields(each, (*outer, key))


def with_value(form: Format, field: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(form.config)
    place: Any = config
    for key in field[:-1]:
        place = place[key]
    place[field[-1]] = value
    return config
