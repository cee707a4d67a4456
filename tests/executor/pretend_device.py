"""An accelerator that is not there: its tensors lie on the CPU, and like a real one's mix with no tensors of the CPU.

It tells whether code that is to run on an accelerator keeps its tensors together, and nothing of kernels or time. Tests
that take their device from here run on it with `QUIRE_TEST_DEVICE=pretend`, and with `cuda` on a real one.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quire.ops
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear

_CHOSEN = os.environ.get("QUIRE_TEST_DEVICE", "cpu")

DEVICE = "cuda" if _CHOSEN == "pretend" else _CHOSEN
"""Where tests compute what they compare with Transformers: cpu or cuda."""

IS_ACCELERATED = DEVICE != "cpu"

_MIXES = frozenset(
    {
        "copy_",
        "to",
        "type_as",
        "set_",
        "__getitem__",
        "index",
        "__get__",
        "__set__",
        "_has_compatible_shallow_copy_type",
    }
)
"""Functions that take tensors of both, `__getitem__` for an index on the host, or one number."""


_READS = frozenset(
    {
        *("__bool__", "__float__", "__index__", "__int__", "bincount", "cpu", "item", "masked_select", "nonzero"),
        *("numpy", "tolist", "unique", "unique_consecutive"),
    }
)
"""Functions for which the host waits for the device, of which some make tensors whose sizes depend on its data."""


class Elsewhere(Tensor):
    """A tensor on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class _Event:
    """An event of a device whose work is done at once."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Stream:
    """A stream of it."""

    def wait_stream(self, other: Any) -> None:
        pass


_OF_THE_DEVICE = {
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": lambda _: contextlib.nullcontext(),
    "Event": _Event,
    "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=4, major=9, minor=0),
    "is_current_stream_capturing": lambda: False,
}
"""What `torch.cuda` has of it."""


class PretendDevice(TorchFunctionMode):
    """While it is entered, tensors may be put on the device `cuda`.

    Attributes:
        num_pinned: allocations of pinned memory.
        num_copies: by direction, "in" and "out".
    """

    _may_read = True

    def __init__(self) -> None:
        super().__init__()
        self.num_pinned = 0
        self.num_copies = Counter[str]()

    def __enter__(self) -> Any:
        self._known = {name: getattr(torch.cuda, name) for name in _OF_THE_DEVICE}
        for name, pretended in _OF_THE_DEVICE.items():
            setattr(torch.cuda, name, pretended)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for name, known in self._known.items():
            setattr(torch.cuda, name, known)
        super().__exit__(*raised)

    @contextlib.contextmanager
    def without_reads(self) -> Iterator[None]:
        """What needs values of the device on the host raises RuntimeError, as while a CUDA graph is captured."""
        self._may_read = False
        try:
            yield
        finally:
            self._may_read = True

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        is_there = any(isinstance(each, Elsewhere) for each in tensors)
        attribute = getattr(func, "__self__", None) if name == "__get__" else None
        if attribute is torch.Tensor.device and is_there:
            return torch.device("cuda:0")
        if attribute is torch.Tensor.is_cuda:
            return is_there
        is_mask = name == "__getitem__" and any(x.dtype == torch.bool for x in tensors[1:])
        if is_there and not self._may_read and (name in _READS or is_mask):
            raise RuntimeError(f"{name} waits for the device")
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and is_there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if is_there and name not in _MIXES and any(not isinstance(x, Elsewhere) and _is_on_host(x) for x in tensors):
            raise RuntimeError(f"Expected all tensors of {name} to be on the same device, but some are on the CPU")
        is_indexed = name == "__getitem__" and not isinstance(args[0], Elsewhere)
        if is_indexed and any(isinstance(x, Elsewhere) and x.dim() > 0 for x in tensors):
            raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        asked = _asked((args, kwargs))
        if kwargs.pop("pin_memory", False):
            self.num_pinned += 1
        args, kwargs = _on_cpu(args), _on_cpu(kwargs)
        if name == "cpu" or (asked is not None and asked.type == "cpu" and name == "to"):
            out = func(*args, **kwargs)
            return _plain(out)
        if name == "pin_memory":
            self.num_pinned += 1
            return args[0].clone()
        if name == "cuda":
            return args[0].clone().as_subclass(Elsewhere)
        if name == "to" and len(tensors) == 2:
            is_there = isinstance(tensors[1], Elsewhere)
        if name == "copy_":
            is_there = isinstance(args[0], Elsewhere)
            if is_there != isinstance(args[1], Elsewhere):
                self.num_copies["in" if is_there else "out"] += 1
        if name == "to" and asked is not None and asked.type == "cuda" and not isinstance(args[0], Elsewhere):
            self.num_copies["in"] += 1
        out = func(*args, **kwargs)
        if asked is not None and asked.type != "meta":
            is_there = asked.type == "cuda"
        return _there(out) if is_there else out


class Launches(TorchDispatchMode):
    """Sees the operations of torch that launch kernels, which are those that compute or copy.

    Attributes:
        names: of the operations.
    """

    WITHOUT_KERNELS = ("empty", "new_empty", "_unsafe_view", "set_", "lift_fresh", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def is_counted(self) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        if self.is_counted() and not func.is_view and name not in self.WITHOUT_KERNELS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def enter_pretended_device() -> None:
    """For each thread that computes on it: once and for all, if it is chosen."""
    if _CHOSEN == "pretend":
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters' types are to change
        torch._C.DisableTorchFunction = _OtherModesOff  # type: ignore[misc]  # code that hides from a mode stays on it
        quire.ops.bind = _bind_plain_torch
        PretendDevice().__enter__()


_bind = quire.ops.bind


def _bind_plain_torch(device: str, **options: Any) -> Any:
    """Binds plain torch to the pretended device, on which Triton's interpreter would take minutes for a model."""
    return EagerBackend(PlainLinear()) if device == "cuda" else _bind(device, **options)


class _OtherModesOff:
    """All modes are off, but for the pretended device below them."""

    def __enter__(self) -> None:
        self._modes = []
        while overrides._len_torch_function_stack() > 1:
            self._modes.append(overrides._pop_mode())

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self._modes):
            overrides._push_mode(mode)


def _is_on_host(x: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dim() > 0 and x.device.type == "cpu"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _asked(value: Any) -> torch.device | None:
    """The device that is named among arguments."""
    args, kwargs = value
    for each in (kwargs.get("device"), *args):
        if isinstance(each, torch.device) or (isinstance(each, str) and each.split(":")[0] in ("cpu", "cuda", "meta")):
            return torch.device(each)
    return None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, dict):
        return {name: _on_cpu(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_on_cpu(each) for each in value)
    return value


def _there(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if isinstance(value, Elsewhere) else value.as_subclass(Elsewhere)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_there, value))
    if isinstance(value, tuple | list):
        return type(value)(map(_there, value))
    return value


def _plain(value: Tensor) -> Tensor:
    return value.clone().as_subclass(Tensor) if isinstance(value, Elsewhere) else value
