"""The backend's operations with a span around each, for timelines. Used only with a profiler."""

import time
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.trace import Spans
from quire.ops.activations import Activation, PlainActivation
from quire.ops.backend import Backend, DeviceRows
from quire.ops.latent import LatentOperations
from quire.ops.linear import LinearWeight
from quire.ops.recording import Recording
from quire.ops.recurrent import RecurrentOperations
from quire.ops.residual_streams import ResidualStreamOperations
from quire.ops.sampling import SamplingOperations
from quire.ops.stored import StoredWeight


def timed(ops: Backend, spans: Spans) -> Backend:
    """Wraps `ops`, each operation in a span of its name; a linear layer's name has its sizes: `linear 1024x3072`.

    On an accelerator a span is the time of the launch, not of the kernel.
    """
    # Most operations are generated from the names that `Backend` declares, so that none can be forgotten.
    operations = {name: _in_span(name) for name in _TimedBackend.__abstractmethods__}
    return type("TimedBackend", (_TimedBackend,), operations)(ops, spans)


class _TimedBackend(Backend[Any, Any, Any]):
    """The operations that take more than a span of their name."""

    def __init__(self, ops: Backend, spans: Spans) -> None:
        self._ops = ops
        self._spans = spans
        self._layers: dict[int, str] = {}  # by the identity of packed weights, which live as long as the model
        self._recorded: list[str] | None = None  # operations of the recording that is being made, if any
        self.packed_types = ops.packed_types
        self.recording_rules = ops.recording_rules
        self.latent = _timed_part(LatentOperations, ops.latent, self.run)
        self.recurrent = _timed_part(RecurrentOperations, ops.recurrent, self.run)
        self.sampling = _timed_part(SamplingOperations, ops.sampling, self.run)
        self.residual_streams = _timed_part(ResidualStreamOperations, ops.residual_streams, self.run)

    def run(self, span: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `operation` in a span, adds the name to a recording in progress, and returns the result."""
        if self._recorded is not None:
            self._recorded.append(span)
        with self._spans.span(span):
            return operation(*args, **kwargs)

    def pack_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Any:
        return self._named(weight, self._ops.pack_linear(weight, bias))

    def pack_gated_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Any:
        return self._named(weight, self._ops.pack_gated_linear(weight, bias))

    def has_rows(self, packed: Any) -> bool:
        return self._ops.has_rows(packed)

    @property
    def layout(self) -> str:
        return self._ops.layout

    def restore(self, stored: StoredWeight) -> Any:
        packed = self._ops.restore(stored)
        return self._named(stored, packed) if stored.shape else packed

    def linear(self, x: Tensor, packed: Any, activation: PlainActivation | None = None) -> Tensor:
        return self.run(self._layers[id(packed)], self._ops.linear, x, packed, activation)

    def gated_linear(self, x: Tensor, packed: Any, activation: Activation = "silu") -> Tensor:
        return self.run(self._layers[id(packed)], self._ops.gated_linear, x, packed, activation)

    def attention_batch(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        slot_mapping: Tensor,
        *,
        block_size: int,
        prefix_spans: np.ndarray | None = None,
        there: DeviceRows | None = None,
    ) -> Any:
        with self._spans.span("attention_batch"):  # computes nothing, so no recording has it
            return self._ops.attention_batch(
                query_lens, seq_lens, block_tables, slot_mapping,
                block_size=block_size, prefix_spans=prefix_spans, there=there,
            )  # fmt: skip

    def sequence_batch(self, lengths: np.ndarray, device: torch.device) -> Any:
        with self._spans.span("sequence_batch"):  # as above
            return self._ops.sequence_batch(lengths, device)

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        names: list[str] = []
        self._recorded = names
        try:
            result, recording = self._ops.record(run)
        finally:
            self._recorded = None
        return result, recording and _TimedRecording(recording, names, self._spans)

    def _named(self, weight: LinearWeight | StoredWeight, packed: Any) -> Any:
        num_outputs, num_inputs = weight.shape
        self._layers[id(packed)] = f"linear {num_inputs}x{num_outputs}"
        return packed


def _in_span(name: str) -> Callable[..., Any]:
    def operation(self: _TimedBackend, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, getattr(self._ops, name), *args, **kwargs)

    return operation


def _timed_part(declared: ABCMeta, ops: object, run: Callable[..., Any]) -> Any:
    """`ops`, an object of the class `declared`, each of its operations through `run`, in a span of its name."""

    def in_span(name: str) -> Callable[..., Any]:
        return lambda _, *args, **kwargs: run(name, getattr(ops, name), *args, **kwargs)

    names = declared.__abstractmethods__
    return type(f"Timed{declared.__name__}", (declared,), {name: in_span(name) for name in names})()


_WHOLE = "recorded operations"
"""The span of a recording whose operations cannot be told apart."""


class _TimedRecording:
    """A recording whose operations are spans under the names that they were recorded with."""

    def __init__(self, recording: Recording, names: list[str], spans: Spans) -> None:
        self._recording = recording
        self._names = names
        self._spans = spans

    def run(self) -> None:
        self.run_timed()

    def run_timed(self) -> list[float]:
        begin = time.monotonic()
        ends = self._recording.run_timed()
        if len(ends) != len(self._names):
            self._spans.add(_WHOLE, begin, ends[-1])
            return ends
        for name, end in zip(self._names, ends, strict=True):
            self._spans.add(name, begin, end)
            begin = end
        return ends
