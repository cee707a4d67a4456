"""The report at the end of a sweep: prints a table, and draws plots next to the results."""

import argparse
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from quire.frontend.bench.sweep import plots
from quire.frontend.bench.sweep.plots import Axis, Plot, median_points
from quire.frontend.bench.tables import show as print_table


def add_report_arguments(parser: Any) -> None:
    """Adds the flags of every sweep; all but the last are vLLM's."""
    parser.add_argument("-o", "--output-dir", default="results", help="Folder of experiments (default: %(default)s).")
    parser.add_argument("-e", "--experiment-name", help="Folder of this experiment (default: the time).")
    parser.add_argument("--num-runs", type=int, default=3, help="Runs of each combination (default: %(default)s).")
    parser.add_argument("--continue-on-error", action="store_true", help="Go on with the next run when one fails.")
    parser.add_argument("--show-stdout", action="store_true", help="Show what the commands print.")
    parser.add_argument("--dry-run", action="store_true", help="Print the commands and run nothing.")
    parser.add_argument("--resume", action="store_true", help="Go on with an experiment: run what has no result yet.")
    parser.add_argument("--no-plots", action="store_true", help="Only a table and JSON; needs no matplotlib.")


def show(args: argparse.Namespace, folder: Path, rows: list[dict[str, Any]], kinds: list[Plot]) -> None:
    """Prints the medians of the plotted figures, and draws plots unless `--no-plots` is set."""
    axes = list({axis.key: axis for kind in kinds for axis in (kind.x, kind.y) if axis is not None}.values())
    cells = table_of(rows, axes)
    table = Table(title=f"Sweep {folder.name} (medians)", box=box.SIMPLE)
    for column in cells[0]:
        table.add_column(column, justify="left" if column in ("serve", "bench") else "right")
    for row in cells[1:]:
        table.add_row(*row)
    print_table(table)
    if not args.no_plots:
        plots.draw(folder, f"Sweep {folder.name}", rows, kinds, cells)
    print(f"results are in {folder}")


def table_of(rows: list[dict[str, Any]], axes: list[Axis]) -> list[list[str]]:
    """A header, and a row of medians for each (serve, bench)."""
    runs = {(row["serve"], row["bench"]): 0 for row in rows}
    for row in rows:
        runs[row["serve"], row["bench"]] += 1
    head = ["serve", "bench", "runs", *(axis.label for axis in axes)]
    medians = median_points(rows, [axis.key for axis in axes])
    return [head] + [
        [*place, str(runs[place]), *(f"{value:.2f}" for value in values)] for place, values in medians.items()
    ]
