"""The comparison as Markdown: medians, the ratios of Quire's to each peer's, and whether targets are reached."""

import statistics
from collections.abc import Sequence
from typing import Any

from rows import Figures, Row
from targets import Target

OURS = "Quire"


def markdown(rows: Sequence[Row], results: dict[str, dict[str, Any]]) -> str:
    """A table of the rows that have results. A ratio or figure with a target says `(≥ 2 ✓)` or `(≥ 2 ✗)`."""
    peers = list(dict.fromkeys(name for result in results.values() for name in result["runs"] if name != OURS))
    engines = [OURS, *peers]
    titles = ["workload", "figure", *engines, *(f"{OURS} / {peer}" for peer in peers), "runs"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in (row for row in rows if row.name in results):
        runs: dict[str, list[Figures]] = results[row.name]["runs"]
        medians = {name: _medians(figures) for name, figures in runs.items() if figures}
        counts = ", ".join(str(len(runs[name])) for name in engines if name in runs)
        for metric in dict.fromkeys(metric for figures in medians.values() for metric in figures):
            values = [medians.get(name, {}).get(metric) for name in engines]
            targets = {target.of: target for target in row.targets.get(metric, ())}
            cells = [_cell(values[0], "", targets.get(None)), *(_cell(value) for value in values[1:])]
            cells += [
                _cell(values[0] / peer if peer and values[0] is not None else None, " ×", targets.get(name))
                for name, peer in zip(peers, values[1:], strict=True)
            ]
            lines.append(f"| {row.title} | {metric} | {' | '.join(cells)} | {counts} |")
    return "\n".join(lines)


def _medians(runs: list[Figures]) -> Figures:
    return {metric: statistics.median(run[metric] for run in runs) for metric in runs[0]}


def _cell(value: float | None, unit: str = "", target: Target | None = None) -> str:
    if value is None:
        return "" if target is None else f"({target.relation} {target.limit:g})"
    text = f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{text}{unit}" + (f" ({target.mark(value)})" if target else "")
