"""Progress over requests, with tokens per second: a bar on a terminal or on request, or lines in the log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from quire.core.logging import get_logger

logger = get_logger(__name__)

MakeBar = Callable[..., Any]
"""Makes a bar as `tqdm.tqdm` does, of `total`, `desc` and `dynamic_ncols`; the bar has `update` and `close`."""


class RequestProgress(Protocol):
    """Counts finished requests. May be called from any thread."""

    def advance(self, num_tokens: int) -> None:
        """Counts a finished request that generated `num_tokens`."""


class _NoProgress:
    def advance(self, num_tokens: int) -> None:
        """Shows nothing."""


class _MadeBar:
    """A bar of the program's own, with tqdm's interface."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, num_tokens: int) -> None:
        """Counts a request; such a bar has no place for tokens."""
        self._bar.update(1)


class LoggedProgress:
    """A line in the log now and then, where no terminal can show a bar.

    Args:
        total: number of requests.
        interval: least seconds between two lines.
    """

    def __init__(self, total: int, interval: float = 10.0) -> None:
        self._total = total
        self._interval = interval
        self._num_done = self._num_tokens = 0
        self._started = self._said = time.monotonic()

    def advance(self, num_tokens: int) -> None:
        """Counts a request, and says so if the last line is old."""
        self._num_done += 1
        self._num_tokens += num_tokens
        now = time.monotonic()
        if now - self._said < self._interval and self._num_done < self._total:
            return
        self._said = now
        rate = self._num_tokens / max(now - self._started, 1e-9)
        logger.info("requests done: %d of %d, %.0f tokens/s", self._num_done, self._total, rate)


@contextlib.contextmanager
def open_progress(title: str, total: int | None, show: bool | MakeBar | None = None) -> Iterator[RequestProgress]:
    """A bar on stderr for the duration of the `with` block.

    Args:
        total: number of requests; None if unknown.
        show: None shows the bar only on a terminal; a function makes the bar.
    """
    if callable(show):
        with contextlib.closing(show(total=total, desc=title, dynamic_ncols=True)) as bar:
            yield _MadeBar(bar)
        return
    if show is False or (show is None and not sys.stderr.isatty()):
        yield _NoProgress()
        return
    # Imported here, because most processes never show a bar.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[rate]:.0f} tok/s"),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, rate=0.0)
        started, num_done = time.monotonic(), 0

        class _Bar:
            def advance(self, num_tokens: int) -> None:
                nonlocal num_done
                num_done += num_tokens
                bar.update(task, advance=1, rate=num_done / max(time.monotonic() - started, 1e-9))

        yield _Bar()
