"""Loads adapters beside the steps: reads their files, keeps a rank's parts in memory, and copies them to slots."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from quire.core import envs
from quire.core.config.lora import AdapterOptions
from quire.core.errors import ModelLoadError
from quire.core.file_reads import FileReads
from quire.core.logging import get_logger
from quire.core.wire.adapters import Adapter, AdapterLoad, LoadedAdapter
from quire.executor.layers.adapter_matching import match_layers
from quire.executor.layers.adapters import Adapters, AdapterWeight, PreparedWeight
from quire.executor.weights.peft.tensors import PeftCheckpoint

logger = get_logger(__name__)

_LOWEST_PRIORITY = 19


class AdapterLoader:
    """The adapters in the memory of a rank's host. Threads of low priority load them, in the order of calls. Files that
    do not come are given up.

    Args:
        place: where the model's layers meet adapters.
        options: the server's.
        device: of the slots.
        of_task: reads the adapter of a task from the model's own weights; None: there are none.
    """

    def __init__(
        self,
        place: Adapters,
        options: AdapterOptions,
        device: torch.device,
        of_task: Callable[[str], Mapping[str, AdapterWeight]] | None = None,
    ) -> None:
        self._place = place
        self._of_task = of_task
        self._dtype = None if options.dtype is None else getattr(torch, options.dtype)
        self._device = device
        self._held: dict[bytes, tuple[list[PreparedWeight], list[str]]] = {}  # by digest
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=_step_back)
        self._reads = FileReads(envs.read_float("LORA_LOAD_TIMEOUT_S"), begin=_step_back)

    def load(self, payload: bytes, answer: Callable[[bytes], None]) -> None:
        """Starts a load, an `AdapterLoad`; `answer` gets the `LoadedAdapter`, on the loader's thread."""
        load = msgspec.msgpack.decode(payload, type=AdapterLoad)
        self._thread.submit(lambda: answer(msgspec.msgpack.encode(self._load(load))))

    def _load(self, load: AdapterLoad) -> LoadedAdapter:
        try:
            for digest in load.dropped:
                self._held.pop(digest, None)
            held = self._held.get(load.adapter.digest)
            if held is None:
                held = self._reads.read(load.adapter.digest, lambda: self._read(load.adapter))
                self._held[load.adapter.digest] = held
            weights, left_over = held
            if load.slot >= 0:
                self._place.put(load.slot, weights)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
            return LoadedAdapter(left_over=left_over)
        except TimeoutError as error:
            return LoadedAdapter(str(error), is_late=True)
        except (ModelLoadError, OSError) as error:
            return LoadedAdapter(str(error))
        except Exception as error:  # whatever it is, requests wait for the answer
            logger.exception("an adapter cannot be loaded: %s", load.adapter.path)
            return LoadedAdapter(f"{type(error).__name__}: {error}")

    def _read(self, adapter: Adapter) -> tuple[list[PreparedWeight], list[str]]:
        if adapter.is_of_task:
            weights = {} if self._of_task is None else self._of_task(adapter.name)
            if not weights:
                raise ModelLoadError("the checkpoint's weights have no adapters.")
            return self._place.prepare(weights, self._dtype), []
        checkpoint = PeftCheckpoint(adapter)
        try:
            matched = match_layers(checkpoint, self._place)
            return self._place.prepare(matched.weights, self._dtype), matched.left_over
        finally:
            checkpoint.close()


def _step_back() -> None:
    """Lets the steps' threads have the cores first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
