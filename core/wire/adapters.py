"""Adapters of the served model: low-rank weights that some requests add to those of its layers (LoRA)."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the file of an adapter's weights; the first that exists counts."""

LAYER_TYPES = ("LORA", "IA3", "TRAINABLE_TOKENS")
"""PEFT's names of the types of adapters that change layers of the model."""

LATE_REMEDY = "Try again later; QUIRE_LORA_LOAD_TIMEOUT_S allows more time."
"""What to do about an adapter whose files have not come in time."""

LOAD_ADAPTER = "load_adapter"
"""A `WorkerCall` whose payload is an `AdapterLoad`; the answer is a `LoadedAdapter`, and comes when the load is done.
Steps go on meanwhile."""


class Adapter(Struct, array_like=True, frozen=True):
    """One version of an adapter. Requests with the same digest share slots, memory and pages of the prefix cache."""

    name: str  # as clients know it
    path: str  # of its folder, on the engine's hosts; empty for one among the model's own weights
    digest: bytes  # of its files' content: see `adapter_digest`
    invocation: tuple[int, ...] = ()  # tokens from whose last place in a prompt on it is added; empty: to all tokens

    @classmethod
    def of_task(cls, task: str) -> "Adapter":
        """The one that the model's own weights have for a task."""
        return cls(task, "", hashlib.sha256(b"task " + task.encode()).digest())

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """The first token of a prompt to which the adapter is added; None: to none, as the prompt does not invoke it.

        See Activated LoRA, arXiv:2504.12397.
        """
        size, wanted = len(self.invocation), list(self.invocation)
        if not wanted:
            return 0
        starts = (start for start in range(len(token_ids) - size, -1, -1) if token_ids[start] == wanted[0])
        return next((start for start in starts if list(token_ids[start : start + size]) == wanted), None)

    @property
    def is_of_task(self) -> bool:
        """True for one among the model's own weights."""
        return not self.path


class AdapterLoad(Struct, array_like=True, frozen=True):
    """An adapter that the workers shall read into the host's memory, and copy to a slot.

    An adapter that is in the host's memory already is only copied.
    """

    adapter: Adapter
    slot: int  # of the workers' adapters; -1: none, the host's memory is enough
    dropped: list[bytes] = []  # digests of adapters that leave the host's memory first


class LoadedAdapter(Struct, array_like=True, frozen=True):
    """One rank's answer to an `AdapterLoad`."""

    error: str | None = None  # why the adapter cannot be used
    left_over: list[str] = []  # tensors that belong to no layer of this rank; those of no rank's are a fault
    is_late: bool = False  # the error: its files have not come in time, and may come yet


def adapter_files(folder: Path) -> list[Path]:
    """The files that make up an adapter: its configuration and its weights, as far as they exist."""
    weights = next((folder / name for name in WEIGHTS_NAMES if (folder / name).is_file()), None)
    return [path for path in (folder / CONFIG_NAME, weights) if path is not None and path.is_file()]


def adapter_digest(folder: Path) -> bytes:
    """The digest of an adapter's files, which takes a second for each gigabyte. Raises OSError."""
    total = hashlib.sha256()
    for path in adapter_files(folder):
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.digest()
