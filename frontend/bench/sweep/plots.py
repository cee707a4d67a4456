"""Plots of a sweep's results as PNG files, and in one HTML page with the table."""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from quire.core.errors import ConfigError


class Axis(Struct, frozen=True):
    """A figure of the results, and its label."""

    key: str
    label: str


class Plot(Struct, frozen=True):
    """A plot of results with one line per server and one point per benchmark (the median over its runs)."""

    name: str
    x: Axis | None  # None: a bar per point, by name
    y: Axis


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401  # not installed by default
    except ImportError:
        raise ConfigError("Plots need matplotlib: install quire[bench], or do without them by --no-plots.") from None


def draw(folder: Path, title: str, rows: list[dict[str, Any]], plots: Sequence[Plot], table: list[list[str]]) -> None:
    """Writes `NAME.png` for each plot, and `report.html` with all of them and the table."""
    vectors = []
    for plot in plots:
        figure = _figure(plot, rows)
        figure.savefig(folder / f"{plot.name}.png", dpi=150)
        vectors.append(_svg(figure))
    (folder / "report.html").write_text(_page(title, vectors, table), encoding="utf-8")


def median_points(rows: list[dict[str, Any]], keys: list[str]) -> dict[tuple[str, str], list[float]]:
    """The medians of `keys` over the runs of each (serve, bench)."""
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        places.setdefault((row["serve"], row["bench"]), []).append(row)
    return {
        place: [float(np.median([row[key] for row in runs])) for key in keys]
        for place, runs in places.items()
        if all(key in row for row in runs for key in keys)
    }


def _figure(plot: Plot, rows: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure  # not pyplot, which needs a display and has global state

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if plot.x is None:
        points = median_points(rows, [plot.y.key])
        names = [" ".join(filter(None, place)) or "default" for place in points]
        axes.barh(names, [values[0] for values in points.values()])
        axes.invert_yaxis()
        axes.set_xlabel(plot.y.label)
        return figure
    lines: dict[str, list[tuple[str, float, float]]] = {}
    for (serve, bench), (x, y) in median_points(rows, [plot.x.key, plot.y.key]).items():
        lines.setdefault(serve, []).append((bench, x, y))
    for serve, line in lines.items():
        axes.plot([x for _, x, _ in line], [y for *_, y in line], marker="o", label=serve or None)
        for bench, x, y in line:
            axes.annotate(bench, (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel(plot.x.label)
    axes.set_ylabel(plot.y.label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    return figure


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    drawing = text.getvalue()
    return drawing[drawing.index("<svg") :]  # without the XML declaration, which HTML does not take


def _page(title: str, vectors: list[str], table: list[list[str]]) -> str:
    head, *body = table
    cells = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    rows = "\n".join(f"<tr>{row}</tr>" for row in cells)
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}svg{max-width:45em}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f"<table>{rows}</table>\n" + "\n".join(vectors) + "\n</body></html>\n"
    )
