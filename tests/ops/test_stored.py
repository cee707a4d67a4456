"""Packed weights, taken apart and put together again: products have the same bits in every backend."""

import copy
import json

import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend
from quire.ops.experts import ExpertCall, ExpertWeights
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight
from quire.ops.stored import StoredWeight, put_together, take_apart


def weight_of(kind: str, out: int, size: int) -> LinearWeight:
    torch.manual_seed(0)
    if kind == "int8":
        return QuantizedWeight(torch.randint(-127, 128, (out, size), dtype=torch.int8), torch.rand(out, 1) / 100)
    if kind == "int4":
        codes = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8)
        scales, order = (torch.rand(out, size // 32) / 100).bfloat16(), torch.randperm(size)
        return QuantizedWeight(codes, scales, torch.arange(-8.0, 8), -scales, order)
    return torch.randn(out, size).to(getattr(torch, kind))


def stored_and_back(ops: Backend, packed: object) -> object:
    """As a file keeps it: the form as JSON, the tensors as bytes."""
    stored = take_apart(packed)
    tensors = [tensor.clone() for tensor in stored.tensors]
    return ops.restore(StoredWeight(json.loads(json.dumps(stored.form)), tensors))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_linear_layers(ops: Backend, kind: str, is_gated: bool) -> None:
    weight = weight_of(kind, 70, 96)
    dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(70).to(dtype)
    pack, multiply = (ops.pack_gated_linear, ops.gated_linear) if is_gated else (ops.pack_linear, ops.linear)
    packed = pack(weight, bias)
    assert torch.equal(multiply(x, stored_and_back(ops, packed)), multiply(x, packed))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_experts(ops: Backend, kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    gate_up, down, biases = weight_of(kind, 64, 32), weight_of(kind, 32, 32), torch.randn(3, 64).to(dtype)
    packed = ops.pack_experts([ExpertWeights(gate_up, down, bias) for bias in biases], 3)
    x = torch.randn(4, 32).to(dtype)
    chosen = torch.randint(0, 3, (4, 2)), torch.rand(4, 2)
    call = ExpertCall(x, *chosen)
    assert torch.equal(ops.experts(stored_and_back(ops, packed), call), ops.experts(packed, call))


def test_layers_of_onednn() -> None:
    ops = EagerBackend(OneDnnLinear())
    x, packed = torch.randn(5, 96), ops.pack_linear(torch.randn(70, 96), torch.randn(70))
    assert packed.weight.layout != torch.strided
    assert torch.equal(ops.linear(x, stored_and_back(ops, packed)), ops.linear(x, packed))


def test_other_classes_are_not_put_together(own_native: Backend) -> None:
    form = take_apart(own_native.pack_linear(torch.randn(70, 96).bfloat16())).form
    for change in ({"type": "Popen"}, {"parts": {"args": "true"}}):
        changed = copy.deepcopy(form) | change
        with pytest.raises(ValueError, match="another form than this version reads"):
            put_together(StoredWeight(changed, []), own_native.packed_types)


def test_what_has_no_form_is_not_taken_apart() -> None:
    with pytest.raises(TypeError, match="holds a set, which cannot be stored"):
        take_apart((torch.zeros(3), {1, 2}))


def test_layouts_differ_by_level(native: Backend, own_native: Backend) -> None:
    assert (native.layout == own_native.layout) == (native._kernels.level == own_native._kernels.level)
