"""The backend's operations with a span around each, for timelines. Used only where a profiler is asked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from quire.core.trace import Spans
from quire.ops import Backend, PackedLinear

OPERATIONS = [name for name, member in vars(Backend).items() if callable(member) and not name.startswith("_")]


def timed(ops: Backend, spans: Spans) -> Backend:
    """`ops`, each operation in a span of its name; a linear layer's is named after its sizes: `linear 1024x3072`.

    On an accelerator a span is the time of the launch, not of the kernel.
    """
    functions = {name: _timed(name, getattr(ops, name), spans) for name in OPERATIONS}
    names: dict[int, str] = {}  # by the identity of packed weights, which live as long as the model

    def packing(pack: Callable[..., PackedLinear]) -> Callable[..., PackedLinear]:
        def call(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
            packed = pack(weight, bias)
            num_outputs, num_inputs = weight.shape
            names[id(packed)] = f"linear {num_inputs}x{num_outputs}"
            return packed

        return call

    def multiplying(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, packed: PackedLinear) -> Tensor:
            with spans.span(names[id(packed)]):
                return multiply(x, packed)

        return call

    functions["pack_linear"], functions["linear"] = packing(ops.pack_linear), multiplying(ops.linear)
    functions["pack_gated_linear"] = packing(ops.pack_gated_linear)
    functions["gated_linear"] = multiplying(ops.gated_linear)
    return cast(Backend, SimpleNamespace(**functions))


def _timed(name: str, function: Callable[..., Any], spans: Spans) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with spans.span(name):
            return function(*args, **kwargs)

    return call
