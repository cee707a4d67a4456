"""Starts messages of torch.distributed that outlive the call which starts them."""

from collections.abc import Callable
from typing import Any

import torch


def start_unprofiled(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `isend` or `irecv` without recording it in torch's profiler, and returns its work.

    A message may arrive after a recording has ended. The profiler would then write the message's end into freed memory.
    """
    torch.autograd._enable_record_function(False)
    try:
        return begin(*args, **kwargs)
    finally:
        torch.autograd._enable_record_function(True)
