"""Logs, once a process, which weights do not stay as compact as their checkpoint has them, and which must."""

import functools
import threading

import torch

from quire.core.logging import get_logger

logger = get_logger(__name__)

WITHOUT_ZEROS = "without zeros"
"""The storage of sparse weights, which become dense in memory."""

_lock = threading.Lock()


def log_expanded(kept: torch.dtype | str, how: str) -> None:
    """Logs that layers stored in the way `how` become tensors of a dtype or a width."""
    kind = str(kept).removeprefix("torch.")
    _log_once("some layers are stored %s: they are kept in %s, which takes more memory and time", how, kind)


def log_mxfp4_experts() -> None:
    """Logs that experts are not quantized again."""
    _log_once("experts stay in MXFP4, as the checkpoint has them: other linear layers are made smaller")


def _log_once(message: str, *values: str) -> None:
    with _lock:  # the cache alone calls twice if two threads ask at the same time
        _log(message, *values)


@functools.cache
def _log(message: str, *values: str) -> None:
    logger.info(message, *values)
