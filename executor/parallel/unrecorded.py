"""Messages of torch.distributed that stay under way after the call that begins them."""

from collections.abc import Callable
from typing import Any

import torch


def unrecorded(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `isend` or `irecv` and returns its work, of which torch's profiler does not learn.

    A message may arrive when a recording is over. The profiler would then write its end into memory that it has given
    back.
    """
    torch.autograd._enable_record_function(False)
    try:
        return begin(*args, **kwargs)
    finally:
        torch.autograd._enable_record_function(True)
