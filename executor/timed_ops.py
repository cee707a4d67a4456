"""The backend's operations with a span around each, for timelines. Used only where a profiler is asked for."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from quire.core.trace import Spans
from quire.ops import Backend, PackedLinear, Recording


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
        for name, end in zip(self._names, ends, strict=True):
            self._spans.add(name, begin, end)
            begin = end
        return ends


OPERATIONS = [name for name, member in vars(Backend).items() if callable(member) and not name.startswith("_")]


def timed(ops: Backend, spans: Spans) -> Backend:
    """`ops`, each operation in a span of its name; a linear layer's is named after its sizes: `linear 1024x3072`.

    On an accelerator a span is the time of the launch, not of the kernel.
    """
    recorded: list[list[str]] = []  # operations of the recording that is being made, if any

    def timed_as(name_of: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = name_of(*args)
            if recorded and name != "attention_batch":  # which computes nothing
                recorded[-1].append(name)
            with spans.span(name):
                return function(*args, **kwargs)

        return call

    layers: dict[int, str] = {}  # by the identity of packed weights, which live as long as the model

    def packing(pack: Callable[..., PackedLinear]) -> Callable[..., PackedLinear]:
        def call(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
            packed = pack(weight, bias)
            num_outputs, num_inputs = weight.shape
            layers[id(packed)] = f"linear {num_inputs}x{num_outputs}"
            return packed

        return call

    def record(run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        recorded.append([])
        result, recording = ops.record(run)
        names = recorded.pop()
        return result, recording and _TimedRecording(recording, names, spans)

    functions = {name: timed_as(lambda *_, name=name: name, getattr(ops, name)) for name in OPERATIONS}
    for name in ("linear", "gated_linear"):
        functions[name] = timed_as(lambda x, packed: layers[id(packed)], getattr(ops, name))
    for name in ("pack_linear", "pack_gated_linear"):
        functions[name] = packing(getattr(ops, name))
    return cast(Backend, SimpleNamespace(**functions | {"record": record}))
