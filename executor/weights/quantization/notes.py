"""Logs, once a process, which weights do not stay as compact as their checkpoint has them, and which must."""

import functools
import threading

import torch

from quire.core.logging import get_logger

logger = get_logger(__name__)

WITHOUT_ZEROS = "without zeros"
"""The storage of sparse weights, which become dense in memory."""

_lock = threading.Lock()


def note_kept(kept: torch.dtype | str, how: str) -> None:
    """Logs that layers stored in the way `how` become tensors of a dtype or a width."""
    kind = str(kept).removeprefix("torch.")
    _say_once("some layers are stored %s: they are kept in %s, which takes more memory and time", how, kind)


def note_experts() -> None:
    """Logs that experts are not quantized again."""
    _say_once("experts stay in MXFP4, as the checkpoint has them: other linear layers are made smaller")


def _say_once(message: str, *values: str) -> None:
    with _lock:  # the cache alone calls twice if two threads ask at the same time
        _say(message, *values)


@functools.cache
def _say(message: str, *values: str) -> None:
    logger.info(message, *values)
