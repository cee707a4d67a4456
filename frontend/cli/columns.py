"""Plain columns of text."""

from collections.abc import Iterator


def columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A line for each row, its cells padded to the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
