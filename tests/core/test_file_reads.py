"""Reads of files that do not come: a lease of the file keeps those who open it waiting, as hung storage does."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from quire.core.file_reads import FileReads
from tests.storage import hung_file

T = TypeVar("T")


def until_read(reads: FileReads, function: Callable[[], T]) -> T:
    """The value of a function, once the threads that were left behind have returned."""
    until = time.monotonic() + 30
    while True:
        try:
            return reads.read("slow", function)
        except TimeoutError:
            assert time.monotonic() < until, "it never comes back"
            time.sleep(0.01)


def test_a_read_that_takes_too_long_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("slow", "fast")}
    for path in files.values():
        path.write_text(path.name)
    reads = FileReads(0.2, num_threads=2)
    with hung_file(files["slow"]):
        with pytest.raises(TimeoutError, match=r"were not read in 0\.2 s"):
            reads.read("slow", files["slow"].read_text)
        assert reads.read("fast", files["fast"].read_text) == "fast"
        with pytest.raises(TimeoutError):  # at once, and without another thread
            reads.read("slow", files["slow"].read_text)
        with pytest.raises(TimeoutError):
            asyncio.run(reads.ask("slow", files["slow"].read_text))
        assert asyncio.run(reads.ask("fast", files["fast"].read_text)) == "fast"
    assert until_read(reads, files["slow"].read_text) == "slow"


def test_hung_reads_take_few_threads() -> None:
    reads, held = FileReads(0.01, num_threads=2), threading.Event()
    before = threading.active_count()
    for number in range(20):
        with pytest.raises(TimeoutError):
            reads.read(number, held.wait)
    assert threading.active_count() <= before + 2
    held.set()
    assert until_read(reads, lambda: 5) == 5


def test_who_stops_waiting_says_nothing_about_the_files() -> None:
    reads, held, begun = FileReads(10), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        held.wait()

    async def scenario() -> None:
        left = asyncio.create_task(reads.ask("a", hold))
        await asyncio.to_thread(begun.wait)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert await reads.ask("a", lambda: 5) == 5

    asyncio.run(scenario())
    held.set()


def test_errors_of_a_read_are_its_own() -> None:
    async def ask() -> None:
        with pytest.raises(TimeoutError, match="own"):
            await FileReads(10).ask("a", lambda: _raise(TimeoutError("own")))

    with pytest.raises(ValueError, match="wrong"):
        FileReads(10).read("a", lambda: _raise(ValueError("wrong")))
    asyncio.run(ask())


def _raise(error: Exception) -> None:
    raise error
