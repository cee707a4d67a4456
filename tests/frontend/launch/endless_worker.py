"""A worker that is for ever within a library's own code, as one is that imports torch on a busy machine."""

import os
import time
from pathlib import Path
from typing import NoReturn

import torch

from quire.executor.processes import uniproc

uniproc.CLOSE_GRACE_SECONDS = 0.1


def make(*_: object) -> NoReturn:
    """A factory that never returns: torch calls a function, which waits, from C++. Makes a file once it has begun."""
    while True:
        number = torch.ones(1, requires_grad=True)
        number.register_hook(lambda _: time.sleep(0.02))
        number.sum().backward()
        Path(os.environ["BUSY_FILE"]).touch()
