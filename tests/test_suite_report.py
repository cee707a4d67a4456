"""The report of a whole run: which files took how long, and what its lines of progress say."""

from pathlib import Path

import pytest

from tests import suite_report

pytest_plugins = "pytester"

TESTS = """
import subprocess, sys, time

def test_waits():
    time.sleep(0.3)

def test_has_a_process_that_works():
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)

def test_fails():
    assert False
"""
CONFTEST = """
from tests import suite_report
pytest_addoption, pytest_configure = suite_report.add_options, suite_report.register
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(suite_report, "SECONDS_BETWEEN_LINES", 0.1)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_slow=TESTS, test_fast="def test_passes(): pass")
    return pytester


def rows_of(path: Path) -> dict[str, list[float]]:
    head, *rows = [row.split("\t") for row in path.read_text().splitlines()]
    assert head == ["seconds", "CPU", "tests", "file"]
    return {name: [float(value) for value in values] for *values, name in rows}


def test_a_run_says_what_runs_and_what_took_longest(suite: pytest.Pytester) -> None:
    times = suite.path / "times.tsv"
    done = suite.runpytest_inprocess("--suite", f"--file-times={times}", "-p", "no:randomly")
    done.assert_outcomes(passed=3, failed=1)
    done.stdout.re_match_lines(
        [
            r"0\.0 min: \d+%, \d of 4 tests; running test_slow\.py",
            r"failed: test_slow\.py::test_fails",
            r".* slowest 30 files .*",
            r" *seconds +CPU +tests +file",
            r" *\d\.\d +\d\.\d +3  test_slow\.py",
            r" *\d\.\d +\d\.\d +1  test_fast\.py",
        ]
    )
    rows = rows_of(times)
    assert list(rows) == ["test_slow.py", "test_fast.py"]
    seconds, cpu_s, num_tests = rows["test_slow.py"]
    assert seconds >= 0.6
    assert cpu_s >= 0.25, "that of the process that the test started"
    assert num_tests == 3


def test_workers_of_xdist_measure_and_the_first_process_adds(suite: pytest.Pytester) -> None:
    times = suite.path / "times.tsv"
    done = suite.runpytest_inprocess("--suite", f"--file-times={times}", "-n1", "--dist=loadfile")
    done.assert_outcomes(passed=3, failed=1)
    assert rows_of(times)["test_slow.py"][1] >= 0.25
    done.stdout.re_match_lines([r" *\d\.\d +\d\.\d +4  all files"])


def test_without_the_option_a_run_looks_as_ever(suite: pytest.Pytester) -> None:
    done = suite.runpytest_inprocess("test_fast.py")
    assert "min:" not in done.stdout.str()
    done.stdout.fnmatch_lines(["test_fast.py .*"])


def test_the_order_names_files_that_there_are() -> None:
    root = Path(__file__).parents[1]
    assert [name for name in suite_report.seconds_by_file() if not (root / name).is_file()] == []
