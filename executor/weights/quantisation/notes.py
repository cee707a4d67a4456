"""What the log says, once, of weights that cannot stay as short as their checkpoint has them."""

import functools
import threading

import torch

from quire.core.logging import get_logger

logger = get_logger(__name__)

_lock = threading.Lock()


def note_plain(dtype: torch.dtype, how: str) -> None:
    """Says that layers which are quantised in such a way are kept as numbers of `dtype`, once in a process."""
    with _lock:  # the cache alone calls twice if two threads ask at the same time
        _say(dtype, how)


@functools.cache
def _say(dtype: torch.dtype, how: str) -> None:
    name = str(dtype).removeprefix("torch.")
    logger.info("some layers are quantised %s: they are kept in %s, which takes more memory and time", how, name)
