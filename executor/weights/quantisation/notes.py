"""What the log says, once, of weights that cannot stay as short as their checkpoint has them."""

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
    with _lock:  # the cache alone calls twice if two threads ask at the same time
        _say(str(kept).removeprefix("torch."), how)


@functools.cache
def _say(kept: str, how: str) -> None:
    logger.info("some layers are stored %s: they are kept in %s, which takes more memory and time", how, kept)
