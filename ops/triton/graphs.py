"""Recordings of decode steps as CUDA graphs: the host launches one graph instead of some hundred kernels."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.ops.recording import Recording, RecordingRules
from quire.ops.triton.decode_units import MAX_PART_BYTES

logger = logging.getLogger(__name__)

RULES = RecordingRules(
    row_counts=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    # A kernel's grid covers the longest sequence, so a bound far above it starts programs that find nothing to do.
    max_seq_lens=(512, 2048, 8192, 32768, 131072),
    interval=20,
    # Rows are split by their lengths, so a draft has the bits of a decode step, and one long sequence many programs.
    drafts_as="rows",
    shared_bytes=MAX_PART_BYTES,
    # An estimate: a kernel in a graph takes some kilobytes of the card, and a step has hundreds.
    each_bytes=4 << 20,
)


class UnrecordableError(RuntimeError):
    """An operation needs the host in each step, so a graph cannot repeat it."""


class GraphRecorder:
    """Captures steps in graphs, all with one pool of memory.

    Attributes:
        is_capturing: True while a step is captured: its operations do not run, and the host may read no value.
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self._place: _Place | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []  # the allocator may refer to a graph whose capture failed

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Implements `Backend.record`. `run` has run before with the same shapes, so its kernels are loaded."""
        try:
            result, graph = self._capture_in_tight_memory(run)
        except Exception as error:  # the operations of a model, or CUDA, may raise anything
            logger.warning("decode steps run without CUDA graphs, because a step cannot be captured: %s", error)
            return run(), None
        recording = GraphRecording(graph)
        recording.run()
        return _borrowed(result), recording

    def _capture_in_tight_memory(self, run: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        """Captures a step. The graphs' pool cannot use memory that torch keeps for other steps, unless it is freed."""
        try:
            return self._capture(run)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return self._capture(run)

    def _capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        if self._place is None:
            self._place = _Place()
        place, graph, current = self._place, torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        place.stream.wait_stream(current)
        with torch.cuda.stream(place.stream):
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
            try:
                with self._capturing():
                    result = run()
                graph.capture_end()
            except Exception:
                self._abandon(graph, place)
                raise
        current.wait_stream(place.stream)
        return result, graph

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        self.is_capturing = True
        try:
            with _WithoutHost():
                yield
        finally:
            self.is_capturing = False

    def _abandon(self, graph: torch.cuda.CUDAGraph, place: "_Place") -> None:
        """Ends a capture that failed, so that later memory does not come from the graphs' pool."""
        self._broken.append(graph)
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), place.pool)


class _Place:
    """The stream in which steps are captured, and the memory that their graphs share."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()


class GraphRecording:
    """A step that was captured."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def run(self) -> None:
        self._graph.replay()

    def run_timed(self) -> list[float]:
        """Returns the time at which the graph was launched: its kernels are not told apart."""
        self._graph.replay()
        return [time.monotonic()]


class _Memory:
    """Memory of the device that its user does not own."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _borrowed(result: Tensor) -> Tensor:
    """Returns `result` without ownership of its memory, which later captures may use again."""
    memory = torch.as_tensor(_Memory(result.untyped_storage()), device=result.device)
    return memory.view(result.dtype).as_strided(result.shape, result.stride(), result.storage_offset())


_READS = frozenset(
    {
        *("__bool__", "__float__", "__index__", "__int__", "bincount", "cpu", "item", "masked_select", "nonzero"),
        *("numpy", "tolist", "unique", "unique_consecutive"),
    }
)
"""Functions for which the host waits for the device."""

_COPIES = frozenset({"as_tensor", "copy_", "cuda", "from_numpy", "pin_memory", "tensor", "to"})
"""Functions that may bring values of the host to the device."""


class _WithoutHost(TorchFunctionMode):
    """Raises `UnrecordableError` for functions with which the host reads or sends values.

    An error of ours leaves a capture valid, so that it can be ended; one of CUDA's does not.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        is_mask = name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if is_mask or (name in _READS and any(_is_there(x) for x in args)):
            raise UnrecordableError(f"{name} reads values of the device")
        if name in _COPIES and _is_sent(name, args, kwargs):
            raise UnrecordableError(f"{name} sends values of the host")
        return func(*args, **kwargs)


def _is_there(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _is_sent(name: str, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a call of one of `_COPIES` copies from the host's memory to the device's."""
    if name == "copy_":
        return _is_there(args[0]) and not _is_there(args[1])
    if isinstance(args[0], Tensor) and _is_there(args[0]):
        return False
    targets = (*args[1:], kwargs.get("device"))
    return name == "cuda" or any(_is_there(x) or (x is not None and str(x).startswith("cuda")) for x in targets)
