"""A sweep's folder: one JSON file per run, which `--resume` reads back, and a summary of all runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError, QuireError
from quire.frontend.bench.figures import write_json
from quire.frontend.bench.sweep.grid import Setting, file_name


class Point(Struct, frozen=True):
    """One point in the grid."""

    serve: Setting
    bench: Setting

    @property
    def name(self) -> str:
        return " ".join(each.name for each in (self.serve, self.bench) if each.name) or "default"


class Experiment:
    """Runs each point `num_runs` times, except for runs that have a result already.

    Args:
        folder: the folder of the results.
        num_runs: runs of each point.
        go_on: after an error in one run, note the error and start the next run.
    """

    def __init__(self, folder: Path, num_runs: int, *, go_on: bool) -> None:
        self.folder = folder
        self.errors: list[str] = []
        self._num_runs = num_runs
        self._go_on = go_on

    @classmethod
    def open(cls, folder: Path, num_runs: int, *, resume: bool, go_on: bool) -> "Experiment":
        """Raises ConfigError if `resume` is set and the folder does not exist, or the other way round."""
        if resume and not folder.is_dir():
            raise ConfigError(f"--resume: there is no {folder}; name the folder with --output-dir and -e.")
        if not resume and folder.exists():
            raise ConfigError(f"{folder} exists: choose another name with -e, or go on with --resume.")
        return cls(folder, num_runs, go_on=go_on)

    def path(self, point: Point, run: int) -> Path:
        return self.folder / file_name(point.name) / f"run={run}.json"

    def missing(self, point: Point) -> list[int]:
        """Runs without a result."""
        return [run for run in range(self._num_runs) if not self.path(point, run).exists()]

    def run(self, point: Point, measure: Callable[[Path], None]) -> None:
        """Calls `measure` with the path of each missing result, to which `measure` writes.

        Raises:
            QuireError: `measure` raised it, and the sweep does not go on after errors.
        """
        for run in self.missing(point):
            path = self.path(point, run)
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.tolerating(f"{point.name}, run {run}"):
                measure(path)

    def tolerating(self, what: str) -> "_Tolerance":
        """A context that notes and prints an error, if the sweep goes on after errors."""
        return _Tolerance(self, what) if self._go_on else _Tolerance(None, what)

    def results(self, points: list[Point]) -> list[dict[str, Any]]:
        """Every run's figures, with its point's name and flags."""
        rows = []
        for point in points:
            for run in range(self._num_runs):
                path = self.path(point, run)
                if path.exists():
                    flags = point.serve.flags | point.bench.flags
                    place = {"serve": point.serve.name, "bench": point.bench.name, "run_number": run}
                    rows.append(msgspec.json.decode(path.read_bytes()) | flags | place)
        return rows

    def summarize(self, points: list[Point]) -> list[dict[str, Any]]:
        """Writes all results to `summary.json`, and returns them."""
        rows = self.results(points)
        if not rows:
            raise QuireError(f"no run succeeded; the first error: {(self.errors or ['none'])[0]}")
        write_json(str(self.folder / "summary.json"), {"results": rows, "errors": self.errors})
        return rows


class _Tolerance:
    def __init__(self, experiment: Experiment | None, what: str) -> None:
        self._experiment = experiment
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if self._experiment is None or not isinstance(error, QuireError):
            return False
        message = f"{self._what}: {error}"
        print(f"failed: {message}", flush=True)
        self._experiment.errors.append(message)
        return True
