"""Logits processors of the server's owner, loaded by name and isolated from other requests."""

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import LogitsFeature, SampleBatch
from quire.executor.transfers import to_device

logger = get_logger(__name__)


@dataclass(frozen=True)
class ProcessorContext:
    """The argument from which a logits processor is built.

    Attributes:
        max_num_seqs: slots of the worker; a request is in one of 0 .. max_num_seqs - 1 while it runs.
        vocab_size: columns of the logits.
        device: where the logits are.
    """

    max_num_seqs: int
    vocab_size: int
    device: torch.device


class LogitsProcessor(ABC):
    """Changes logits before a token is chosen; public as `quire.LogitsProcessor`, loaded by `--logits-processors`.

    One object serves all requests of a worker, a step's rows at a time, like the features that are built in. With
    several workers each has its own, and all must come to the same logits.

        class Forced(quire.LogitsProcessor):
            def __init__(self, context):
                self.token_ids = np.zeros(context.max_num_seqs, np.int64)

            def admit(self, request):
                token_id = (request.sampling.extra_args or {}).get("forced_token_id")
                self.token_ids[request.slot] = token_id or 0
                return token_id is not None

            def apply(self, logits, batch):
                forced = batch.column(self.token_ids)
                return torch.full_like(logits, -torch.inf).scatter_(1, forced, 0.0)

    Attributes:
        can_go_back: `used` and `apply` depend on the request and on the tokens before each position alone, which are in
            `batch.table`, and raise for none. A request may then have several rows, with drafts among these tokens.
            False, if it is not said otherwise: requests that want the processor get no drafts.
    """

    can_go_back: ClassVar[bool] = False

    def __init__(self, context: ProcessorContext) -> None:  # noqa: B027 - may be left as it is
        """Sets up state; slot-indexed arrays, most often."""

    @abstractmethod
    def admit(self, request: NewSlot) -> bool:
        """Adds a request that enters a slot; returns True if the request wants this processor.

        `request.sampling` are its parameters, `extra_args` among them (`vllm_xargs` over HTTP); `request.token_ids` are
        its tokens, the first `num_prompt_tokens` of which are the prompt. A request that was preempted comes again.

        Raises:
            ValueError: a parameter is wrong; the request is refused with this message.
        """

    def used(self, batch: SampleBatch) -> np.ndarray:
        """Returns the rows that want this processor in this step: [num_rows] bool. Called only for requests that want
        it.
        """
        return np.ones(len(batch.slots), bool)

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Changed logits, [num_rows, vocab_size] float32, of rows that all want it; may change its input in place."""


class CustomFeature(LogitsFeature):
    """A logits processor as a feature. An exception in it ends the requests that want it, and no others."""

    def __init__(self, processor: LogitsProcessor, max_num_seqs: int) -> None:
        self._processor = processor
        self.can_go_back = processor.can_go_back
        self._wanted = np.zeros(max_num_seqs, bool)
        self._refusals: dict[int, str] = {}  # by slot; why its request cannot be served

    def admit(self, request: NewSlot) -> bool:
        self._refusals.pop(request.slot, None)
        try:
            wanted = bool(self._processor.admit(request))
        except Exception as error:  # a user's code, for one request
            if not isinstance(error, ValueError):
                logger.exception("%s failed to admit a request", type(self._processor).__name__)
            self._refusals[request.slot] = f"{type(self._processor).__name__}: {error}"
            wanted = True
        self._wanted[request.slot] = wanted
        return wanted

    def used(self, batch: SampleBatch) -> np.ndarray:
        wanted = self._wanted[batch.slots]
        refused = self._refused(batch)
        rows = np.flatnonzero(wanted & ~refused)
        if len(rows):
            wanted[rows] = self._processor.used(batch.take(rows))
        return wanted

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        refused = self._refused(batch)
        if refused.any():
            return self._apply_around(logits, batch, refused)
        try:
            changed = self._processor.apply(logits, batch)
        except Exception:  # a user's code; the faulty row is unknown
            logger.exception("%s failed on %d rows", type(self._processor).__name__, len(batch.slots))
            self._refusals |= dict.fromkeys(batch.slots.tolist(), f"{type(self._processor).__name__} failed.")
            return logits.fill_(torch.nan)
        if changed.shape != logits.shape:
            message = f"{type(self._processor).__name__} returned logits of another shape."
            self._refusals |= dict.fromkeys(batch.slots.tolist(), message)
            return logits.fill_(torch.nan)
        return changed.float()

    def why_nothing_fits(self, slot: int) -> str | None:
        """Returns the message for the request in `slot` if this processor made its logits unusable, else None."""
        return self._refusals.get(slot)

    def _refused(self, batch: SampleBatch) -> np.ndarray:
        if not self._refusals:
            return np.zeros(len(batch.slots), bool)
        return np.array([slot in self._refusals for slot in batch.slots.tolist()])

    def _apply_around(self, logits: torch.Tensor, batch: SampleBatch, refused: np.ndarray) -> torch.Tensor:
        """Processes the rows of accepted requests. Those of refused ones become NaN, which ends the requests."""
        rows = np.flatnonzero(~refused)
        if len(rows):
            index = to_device(rows, logits.device)
            logits[index] = self.apply(logits[index], batch.take(rows))
        logits[to_device(np.flatnonzero(refused), logits.device)] = torch.nan
        return logits


def load_processors(names: Sequence[str], context: ProcessorContext) -> list[CustomFeature]:
    """Imports and builds the classes `module:Class`, in order; modules may lie in the current folder.

    Raises:
        ModelLoadError: one cannot be imported, is no `LogitsProcessor` or cannot be built; names the flag.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there shadows another module
    return [CustomFeature(_load(name, context), context.max_num_seqs) for name in names]


def _load(name: str, context: ProcessorContext) -> LogitsProcessor:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ModelLoadError(f"--logits-processors {name!r} must be written module:Class.")
    try:
        kind = importlib.import_module(module_name)
        for part in class_name.split("."):
            kind = getattr(kind, part)
    except Exception as error:  # importing a user's code may raise anything
        raise ModelLoadError(f"--logits-processors {name!r} cannot be imported: {error!r}.") from error
    if not (isinstance(kind, type) and issubclass(kind, LogitsProcessor)):
        raise ModelLoadError(f"--logits-processors {name!r} is no subclass of quire.LogitsProcessor.")
    try:
        return kind(context)
    except Exception as error:
        raise ModelLoadError(f"--logits-processors {name!r} cannot be built: {error!r}.") from error
