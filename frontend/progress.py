"""A progress bar over requests, with tokens per second; shown on a terminal, or on request."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol


class RequestProgress(Protocol):
    """Counts finished requests. May be called from any thread."""

    def advance(self, num_tokens: int) -> None:
        """Counts a finished request that generated `num_tokens`."""


class _NoProgress:
    def advance(self, num_tokens: int) -> None:
        """Shows nothing."""


@contextlib.contextmanager
def open_progress(title: str, total: int | None, show: bool | None = None) -> Iterator[RequestProgress]:
    """A bar on stderr for the duration of the `with` block.

    Args:
        total: number of requests; None if unknown.
        show: None shows the bar only on a terminal.
    """
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
