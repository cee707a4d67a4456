"""Reports on a run of the whole suite: lines of progress that say what runs, and the files that took longest."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

SECONDS_BETWEEN_LINES = 30.0
LONG_TEST_SECONDS = 10.0
"""A test that has run for so long is named in the line of progress."""
NUM_SLOWEST = 30

TIMES = Path(__file__).with_name("file_times.tsv")
"""The first rows of what `--file-times` writes, measured or estimated from a sample. Files begin in their order."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--suite", action="store_true", help="lines of progress instead of dots, and the slowest files")
    group.addoption("--file-times", type=Path, metavar="PATH", help="write what each file took, the slowest first")


def register(config: pytest.Config) -> None:
    """Adds the report to pytest, if it was asked for. Workers of xdist only measure; xdist's first process prints."""
    path = config.getoption("--file-times")
    if not config.getoption("--suite") and path is None:
        return
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(CpuTimes())
    if not is_worker:
        config.pluginmanager.register(SuiteReport(config, path))


class CpuTimes:
    """Adds `cpu_s` to the reports: CPU seconds of this process, and of child processes that have ended meanwhile."""

    def __init__(self) -> None:
        self._until_now = 0.0

    def pytest_collection_finish(self) -> None:
        self._until_now = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._until_now = self._until_now, _cpu_seconds()
        report.cpu_s = self._until_now - before  # type: ignore[attr-defined]
        return report


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


Row = tuple[str, str, str, str]
HEAD: Row = ("seconds", "CPU", "tests", "file")


@dataclass
class FileTimes:
    seconds: float = 0.0
    cpu_s: float = 0.0
    num_tests: int = 0

    def row(self, name: str) -> Row:
        return f"{self.seconds:.1f}", f"{self.cpu_s:.1f}", f"{self.num_tests}", name


class SuiteReport:
    """Collects the reports of all tests, prints lines while they run, and the slowest files at the end."""

    def __init__(self, config: pytest.Config, path: Path | None) -> None:
        self._plugins = config.pluginmanager
        self._prints = config.getoption("--suite")
        self._path = path
        self._started_at = time.monotonic()
        self._num_tests = 0
        self._num_ended = 0
        self._running: dict[str, float] = {}  # tests, and when each began
        self._files: dict[str, FileTimes] = defaultdict(FileTimes)
        self._is_over = threading.Event()

    # --------------------------------------------------------------------------------------------- pytest's hooks

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._num_tests = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_tests = len(session.items)

    def pytest_sessionstart(self) -> None:
        if self._prints:
            threading.Thread(target=self._print_lines, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._num_ended += 1
        self._files[file_of(nodeid)].num_tests += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        times = self._files[file_of(report.nodeid)]
        times.seconds += report.duration
        times.cpu_s += getattr(report, "cpu_s", 0.0)  # a worker that crashed sends none
        if self._prints and report.failed:
            self._print(f"failed: {report.nodeid}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        category, letter, word = yield
        return (category, "", "") if self._prints else (category, letter, word)

    def pytest_terminal_summary(self) -> None:
        self._is_over.set()
        if self._path is not None:
            self._path.write_text("".join("\t".join(row) + "\n" for row in [HEAD, *self._rows()]))
        if self._prints:
            self._terminal.section(f"slowest {NUM_SLOWEST} files")
            for seconds, cpu_s, num_tests, name in [HEAD, *self._rows()[:NUM_SLOWEST], self._sum()]:
                self._print(f"{seconds:>8}  {cpu_s:>7}  {num_tests:>6}  {name}")

    # ------------------------------------------------------------------------------------------------------- lines

    def _print_lines(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_LINES):
            self._print(self.line())

    def line(self) -> str:
        """How far the run is, and the files whose tests run now."""
        minutes, now = (time.monotonic() - self._started_at) / 60, time.monotonic()
        if not self._num_tests:
            return f"{minutes:.1f} min: collecting"
        running = [
            file_of(test) if now - began < LONG_TEST_SECONDS else f"{test} for {now - began:.0f} s"
            for test, began in self._running.copy().items()
        ]
        share = self._num_ended / self._num_tests
        counts = f"{share:.0%}, {self._num_ended:,} of {self._num_tests:,} tests"
        return f"{minutes:.1f} min: {counts}; running {', '.join(running) or 'none'}"

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        return self._plugins.getplugin("terminalreporter")

    def _print(self, line: str) -> None:
        self._terminal.ensure_newline()
        self._terminal.write_line(line)

    def _rows(self) -> list[Row]:
        """All files, the slowest first."""
        slowest = sorted(self._files.items(), key=lambda file: -file[1].seconds)
        return [times.row(name) for name, times in slowest]

    def _sum(self) -> Row:
        seconds, cpu_s = (sum(getattr(times, name) for times in self._files.values()) for name in ("seconds", "cpu_s"))
        return FileTimes(seconds, cpu_s, self._num_ended).row("all files")


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


def seconds_by_file() -> dict[str, float]:
    """What the slowest files took in the run that `TIMES` is of."""
    rows = [row.split("\t") for row in TIMES.read_text().splitlines()[1:]]
    return {row[3]: float(row[0]) for row in rows}
