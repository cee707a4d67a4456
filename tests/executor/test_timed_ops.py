"""Operations with spans around them: the backend's results, and the names of the spans."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.trace import SpanList
from quire.executor.timed_ops import timed
from quire.ops import bind
from quire.ops.backend import AttentionForm, Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear


def names(spans: SpanList) -> list[str]:
    return [name for name, _, _ in spans.drain()]


@pytest.fixture
def spans() -> SpanList:
    return SpanList()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_operation_is_a_span_of_its_name(device: str, spans: SpanList) -> None:
    plain = bind(device)
    ops: Backend = timed(plain, spans)
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(ops.rms_norm(x, weight, eps=1e-6), plain.rms_norm(x, weight, 1e-6))
    assert torch.equal(ops.activate_and_mul(x), plain.activate_and_mul(x))
    assert names(spans) == ["rms_norm", "activate_and_mul"]


def test_linear_layers_are_named_after_their_sizes(spans: SpanList) -> None:
    ops = timed(bind("cpu"), spans)
    first, second = ops.pack_linear(torch.randn(6, 8)), ops.pack_gated_linear(torch.randn(10, 6))
    ops.gated_linear(ops.linear(torch.randn(3, 8), first, "gelu"), second)
    assert names(spans) == ["linear 8x6", "linear 6x10"]


def test_a_recorded_encoder_has_spans(spans: SpanList) -> None:
    """Those of its operations; one for all, where an operation is several kernels."""
    plain = bind("cpu")
    if not isinstance(plain, NativeBackend):
        pytest.skip("this machine has no C++ compiler")
    ops = timed(plain, spans)
    heads, angles = torch.randn(7, 6, 16), torch.ones(7, 1, 16)

    def run(rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        batch = ops.sequence_batch(np.array([3, 4]), heads.device)
        return ops.sequence_attention(heads, 2, batch, AttentionForm(0.25), rotation=rotation)

    for rotation, expected in ((None, "sequence_attention"), ((angles, angles), "recorded operations")):
        _, recording = ops.record(partial(run, rotation))
        assert recording is not None
        spans.drain()
        recording.run()
        assert names(spans) == [expected]


def test_a_recording_has_the_spans_that_it_was_made_with(spans: SpanList) -> None:
    plain = bind("cpu")
    if not isinstance(plain, NativeBackend):
        pytest.skip("this machine has no C++ compiler")
    ops = timed(plain, spans)
    x, weight = torch.randn(3, 8), torch.ones(8)

    def run() -> Tensor:
        return ops.activate_and_mul(ops.rms_norm(x, weight, 1e-6))

    _, recording = ops.record(run)
    assert recording is not None
    spans.drain()
    recording.run()
    assert names(spans) == ["rms_norm", "activate_and_mul"]
    ops.activate_and_mul(x)
    assert names(spans) == ["activate_and_mul"], "what comes later belongs to no recording"


class LaunchedAsOne:
    """A recording as a graph is one: its operations are launched together."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run

    def run_timed(self) -> list[float]:
        self.run()
        return [time.monotonic()]


class GraphBackend(EagerBackend[Any]):
    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Any]:
        return run(), LaunchedAsOne(run)


def test_a_recording_that_is_launched_as_one_is_one_span(spans: SpanList) -> None:
    plain = GraphBackend(PlainLinear())
    ops = timed(plain, spans)
    x, weight = torch.randn(3, 8), torch.ones(8)
    _, recording = ops.record(lambda: ops.activate_and_mul(ops.rms_norm(x, weight, 1e-6)))
    assert recording is not None
    spans.drain()
    recording.run()
    assert names(spans)[-1] == "recorded operations"


def test_an_operation_that_the_backend_lacks_is_told_when_it_is_made() -> None:
    class Half(Backend):
        def activate_and_mul(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match="rms_norm"):
        Half()  # type: ignore[abstract]


def test_latent_operations_have_spans_too(spans: SpanList) -> None:
    plain = bind("cpu")
    x, weight = torch.randn(3, 2, 8), torch.randn(2, 8, 5)
    out = timed(plain, spans).latent.head_linear(x, weight)
    assert torch.equal(out, plain.latent.head_linear(x, weight))
    assert names(spans) == ["head_linear"]


def test_recurrent_operations_have_spans_too(spans: SpanList) -> None:
    plain = bind("cpu")
    x, gate = torch.randn(2, 3, 8)
    out = timed(plain, spans).recurrent.multiply_gate(x, gate, "silu")
    assert torch.equal(out, plain.recurrent.multiply_gate(x, gate, "silu"))
    assert names(spans) == ["multiply_gate"]
