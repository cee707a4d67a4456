"""Prints tables: framed and fitted for a terminal, plain and whole for a file or a pipe."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 10_000
"""Characters of a line that nobody has to fit into a window."""


def show(table: Table) -> None:
    """Prints `table` to stdout.

    On a stdout that is no terminal, the table has no frame, no colour and no cut cell, so that `grep` can read it. A
    Markdown table keeps its bars.
    """
    if sys.stdout.isatty():
        Console().print(table)
        return
    if table.box is not box.MARKDOWN:
        table.box = None
    table.title_justify = "left"
    console = Console(width=PIPE_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
