"""The file of all figures, written after every run of every engine, so that a comparison can be resumed."""

import json
import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from rows import Figures


class ResultsError(Exception):
    """The file cannot be used."""


class Results:
    """Figures by row and engine.

    Args:
        path: the file; None keeps the figures only in memory.
        smoke: whether the sizes are tiny; such figures are never mixed with others.
        resume: read the figures in the file, and go on with it.

    Raises:
        ResultsError: the file exists and `resume` is false, or its figures have the other value of `smoke`.
    """

    def __init__(self, path: Path | None, *, smoke: bool, resume: bool) -> None:
        self._path = path
        self._smoke = smoke
        self.rows: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        if not resume:
            raise ResultsError(f"{path} is there already; --resume goes on with it.")
        content = json.loads(path.read_text())
        if content["smoke"] != smoke:
            raise ResultsError(f"{path} was written {'with' if content['smoke'] else 'without'} --smoke.")
        self.rows = {row.pop("row"): row for row in content["results"]}

    def begin(self, row: str, title: str, engines: list[str]) -> dict[str, list[Figures]]:
        """The runs of a row so far, by engine. Clears the row's errors, because failed runs are repeated."""
        entry = self.rows.setdefault(row, {"title": title, "runs": {}, "errors": []})
        entry["errors"] = []
        for name in engines:
            entry["runs"].setdefault(name, [])
        return entry["runs"]

    def add(self, row: str, engine: str, figures: Figures) -> None:
        self.rows[row]["runs"][engine].append(figures)
        self._write()

    def add_error(self, row: str, message: str) -> None:
        self.rows[row]["errors"].append(message)
        self._write()

    @property
    def errors(self) -> list[str]:
        return [f"{name}: {error}" for name, row in self.rows.items() for error in row["errors"]]

    def _write(self) -> None:
        """Writes to another file, and renames it: an interruption leaves the previous file."""
        if self._path is None:
            return
        machine = {"date": f"{date.today()}", "code": _revision(), "cores": os.cpu_count()}
        machine |= {"machine": platform.machine(), "cpu": _cpu(), "smoke": self._smoke}
        content = machine | {"results": [{"row": name} | row for name, row in self.rows.items()]}
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        partial.rename(self._path)


def _revision() -> str:
    """The git revision of Quire's code."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
