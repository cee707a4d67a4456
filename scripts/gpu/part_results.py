"""Figures of a check as JSON lines, and as a table in Markdown."""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any


class Results:
    """Appends figures to a file of JSON lines, each complete, so that a check that is cut off leaves what it found."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_part(cls) -> "Results":
        """Returns the file that the running check gave this part; without one, `gpu_results.jsonl` here."""
        return cls(Path(os.environ.get("GPU_RESULTS", "gpu_results.jsonl")))

    def add(self, **figures: Any) -> None:
        line = json.dumps(figures | {"date": datetime.date.today().isoformat(), "commit": _commit()})
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def write_report(source: Path, target: Path) -> None:
    """Writes the figures of `source` as Markdown: one table of kernels, one of engines, one line for each part."""
    rows = Results(source).read()
    lines = [f"- {row['part']}: {row['outcome']} ({row.get('seconds', 0)} s)" for row in rows if "outcome" in row]
    for ceiling in (row for row in rows if "ceilings" in row):
        lines += ["", ", ".join(f"{name} {value}" for name, value in ceiling["ceilings"].items())]
    kernels = [row for row in rows if "kernel" in row]
    if kernels:
        lines += ["", "| operation | case | µs | floor, µs | share | plain torch, µs |", "|---|---|---|---|---|---|"]
        for row in kernels:
            eager = row.get("eager_us")
            lines.append(
                f"| {row['kernel']} | {row['case']} | {row['us']:.1f} | {row['floor_us']:.1f} | "
                f"{100 * row['floor_us'] / row['us']:.0f} % | {'' if eager is None else f'{eager:.1f}'} |"
            )
    engines = [row for row in rows if "engine" in row]
    if engines:
        lines += ["", "| engine | case | tok/s | ms a step | floor, ms | share |", "|---|---|---|---|---|---|"]
        for row in engines:
            lines.append(
                f"| {row['engine']} | {row['case']} | {row['tokens_per_s']:.0f} | {row['step_ms']:.2f} | "
                f"{row['floor_ms']:.2f} | {100 * row['floor_ms'] / row['step_ms']:.1f} % |"
            )
    lines += [f"- {row['sanitizer']}: {row['outcome_of_tool']}" for row in rows if "sanitizer" in row]
    starts = [row for row in rows if "start" in row]
    lines += [
        "",
        *(
            f"- {row['start']}: ready after {row['ready_s']} s, answers after {row['first_answer_s']} s"
            for row in starts
        ),
    ]
    target.write_text("\n".join(lines) + "\n")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or os.environ.get("QUIRE_COMMIT", "")
