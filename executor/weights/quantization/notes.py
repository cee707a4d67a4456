"""What the log says, once, of weights that cannot stay as short as their checkpoint has them, or that have to."""

import functools
import threading

import torch

from quire.core.logging import get_logger

logger = get_logger(__name__)

WITHOUT_ZEROS = "without zeros"
"""How sparse ones are; these are kept dense."""

_lock = threading.Lock()


def note_kept(kept: torch.dtype | str, how: str) -> None:
    """Says that layers which are stored in such a way are kept as numbers of a dtype, once in a process."""
    kind = str(kept).removeprefix("torch.")
    _say_once("some layers are stored %s: they are kept in %s, which takes more memory and time", how, kind)


def note_experts() -> None:
    """Says that experts are not made smaller, once in a process."""
    _say_once("experts stay in MXFP4, as the checkpoint has them: other linear layers are made smaller")


def _say_once(message: str, *values: str) -> None:
    with _lock:  # the cache alone calls twice if two threads ask at the same time
        _say(message, *values)


@functools.cache
def _say(message: str, *values: str) -> None:
    logger.info(message, *values)
