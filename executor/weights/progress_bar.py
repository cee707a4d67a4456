"""A progress bar for the loading of weights, on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class ProgressBar:
    """A bar on stderr over the checkpoint's tensors."""

    def __init__(self) -> None:
        columns = (TextColumn("Loading weights"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("weights", total=None)
        self._progress.start()

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()
