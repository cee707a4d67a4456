"""Tables for a terminal and for a pipe."""

import io
import re

import pytest
from rich import box
from rich.table import Table

from quire.frontend.bench import tables


def example(**options: object) -> Table:
    table = Table("name", "value", title="Figures", **options)  # type: ignore[arg-type]
    table.add_row("a long name " * 12, "1.5")
    return table


def test_a_pipe_gets_plain_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    tables.show(example())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["Figures"], ["name", "value"], ["a", "long", "name"] * 12 + ["1.5"]]
    tables.show(example(box=box.MARKDOWN))
    assert "\n|--" in capsys.readouterr().out


def test_a_terminal_gets_a_frame_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    tables.show(example())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 40
