"""The ring with real processes: slow, late and killed readers, wrap-around, spills, closing."""

import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from quire.executor.processes.ring import RingClosed, RingReader, RingWriter
from quire.executor.processes.ring_memory import RingHandle, create_ring

# A reader in a process of its own: prints the count and digest of what it read until the ring was closed.
READER = """
import hashlib, sys, time
import msgspec
from quire.executor.processes.ring import RingClosed, RingReader
from quire.executor.processes.ring_memory import RingHandle
handle = msgspec.json.decode(sys.argv[1], type=RingHandle)
index, late_seconds, slow_seconds = int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
time.sleep(late_seconds)
reader = RingReader(handle, index)
print("open", flush=True)
digest, count = hashlib.sha256(), 0
try:
    while True:
        message = reader.read(timeout=60)
        digest.update(len(message).to_bytes(8, "little") + message)
        count += 1
        time.sleep(slow_seconds)
except RingClosed:
    print(count, digest.hexdigest(), flush=True)
"""

MakeRing = Callable[..., RingHandle]


@pytest.fixture
def make_ring() -> Iterator[MakeRing]:
    handles = []

    def make(num_readers: int = 1, **options: int) -> RingHandle:
        handles.append(create_ring(num_readers, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close()


def spawn_reader(handle: RingHandle, index: int, late: float = 0.0, slow: float = 0.0) -> subprocess.Popen[str]:
    arguments = [msgspec.json.encode(handle).decode(), str(index), str(late), str(slow)]
    command = [sys.executable, "-c", READER, *arguments]
    return subprocess.Popen(command, pass_fds=handle.fds, stdout=subprocess.PIPE, text=True)


def report_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    return output.splitlines()[-1]


def expected_report(messages: list[bytes]) -> str:
    digest = hashlib.sha256()
    for message in messages:
        digest.update(len(message).to_bytes(8, "little") + message)
    return f"{len(messages)} {digest.hexdigest()}"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def test_fast_slow_and_late_processes_read_the_same_bytes_in_order(make_ring: MakeRing) -> None:
    handle = make_ring(3, num_slots=4, slot_bytes=128)
    rng = random.Random(0)
    sizes = [rng.choice((0, 1, 127, 128, 129, 1000, 70_000)) for _ in range(300)]  # 128 is the longest in a slot
    messages = [rng.randbytes(size) for size in sizes]
    readers = [spawn_reader(handle, 0), spawn_reader(handle, 1, slow=0.002), spawn_reader(handle, 2, late=0.5)]
    with closing(RingWriter(handle, name="test")) as writer:
        for message in messages:
            writer.write(message, timeout=60)
    assert [report_of(reader) for reader in readers] == [expected_report(messages)] * 3


def test_killed_reader_lets_the_writer_go_when_its_check_says_so(make_ring: MakeRing) -> None:
    handle = make_ring(2, num_slots=2)
    victim = spawn_reader(handle, 1)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "open\n"
    victim.send_signal(signal.SIGKILL)

    def check() -> None:
        if victim.poll() is not None:
            raise ProcessLookupError

    with closing(RingWriter(handle, name="test")) as writer, closing(RingReader(handle, 0)) as survivor:
        writer.write(b"1")
        writer.write(b"2")
        with pytest.raises(ProcessLookupError):
            writer.write(b"3", check=check)
        assert [survivor.read(), survivor.read()] == [b"1", b"2"]
    victim.communicate()


def test_late_reader_finds_everything_and_the_writer_waits_for_it(make_ring: MakeRing) -> None:
    handle = make_ring(1, num_slots=4)
    with closing(RingWriter(handle, name="test")) as writer:
        for number in range(4):
            assert writer.try_write(bytes([number]))
        assert not writer.try_write(b"no room")
        with closing(RingReader(handle, 0)) as reader:
            assert reader.try_read() == b"\0"
            assert writer.try_write(b"\4")
            assert list(reader.drain()) == [b"\1", b"\2", b"\3", b"\4"]
            assert reader.try_read() is None


def test_blocked_writer_resumes_when_a_slot_is_freed(make_ring: MakeRing) -> None:
    handle = make_ring(1, num_slots=2)
    with closing(RingWriter(handle, name="test")) as writer, closing(RingReader(handle, 0)) as reader:
        writer.write(b"1")
        writer.write(b"2")
        thread = threading.Thread(target=writer.write, args=(b"3",), kwargs={"timeout": 60})
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive()
        assert reader.read() == b"1"
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert [reader.read(), reader.read()] == [b"2", b"3"]


def test_sleeping_reader_wakes_at_once(make_ring: MakeRing) -> None:
    handle = make_ring(1)
    with closing(RingWriter(handle, name="test")) as writer, closing(RingReader(handle, 0)) as reader:
        timer = threading.Timer(0.1, writer.write, [b"hello"])
        timer.start()
        assert reader.read(timeout=60) == b"hello"
        timer.join()


def test_waiting_costs_no_processor_time(make_ring: MakeRing) -> None:
    handle = make_ring(1, num_slots=1)
    with (
        closing(RingWriter(handle, name="test")) as writer,
        closing(RingReader(handle, 0, spin_seconds=1e-4)) as reader,
    ):
        started = time.thread_time()  # of the waiting thread: others of the process may be busy
        with pytest.raises(TimeoutError):
            reader.read(timeout=0.3)
        writer.write(b"fills the ring")
        with pytest.raises(TimeoutError):
            writer.write(b"too many", timeout=0.3)
        assert time.thread_time() - started < 0.1


def test_sequence_numbers_wrap(make_ring: MakeRing) -> None:
    handle = make_ring(2, num_slots=3, first_sequence=2**32 - 5)  # becomes four slots
    assert handle.num_slots == 4
    with closing(RingWriter(handle, name="test")) as writer:
        readers = [RingReader(handle, index) for index in range(2)]
        for number in range(0, 20, 4):
            batch = [bytes([number + step]) * 3 for step in range(4)]
            assert all(writer.try_write(message) for message in batch)
            assert not writer.try_write(b"full")
            assert [list(reader.drain()) for reader in readers] == [batch, batch]
        for reader in readers:
            reader.close()


def test_long_messages_spill_and_give_their_memory_back(make_ring: MakeRing) -> None:
    handle = make_ring(1, num_slots=4, slot_bytes=64)
    long_messages = [os.urandom(3_000_000), os.urandom(65), os.urandom(5_000_000)]
    with closing(RingWriter(handle, name="test")) as writer, closing(RingReader(handle, 0)) as reader:
        for _ in range(3):
            for message in long_messages:
                writer.write(message)
            assert os.fstat(handle.spill_fd).st_blocks * 512 >= 8_000_000
            assert [reader.read() for _ in long_messages] == long_messages
        writer.write(b"short")
        assert os.fstat(handle.spill_fd).st_blocks == 0
        assert reader.read() == b"short"


def test_closing_the_writer_lets_readers_finish(make_ring: MakeRing) -> None:
    handle = make_ring(1)
    writer, reader = RingWriter(handle, name="test"), RingReader(handle, 0)
    writer.write(b"last")
    writer.close()
    writer.close()
    assert reader.read() == b"last"
    with pytest.raises(RingClosed):
        reader.read()
    assert list(reader.drain()) == []
    with pytest.raises(RingClosed):
        writer.write(b"after")
    reader.close()


def test_closing_wakes_a_sleeping_reader(make_ring: MakeRing) -> None:
    handle = make_ring(1)
    writer, reader = RingWriter(handle, name="test"), RingReader(handle, 0)
    timer = threading.Timer(0.05, writer.close)
    timer.start()
    with pytest.raises(RingClosed):
        reader.read(timeout=60)
    timer.join()
    reader.close()


def test_reader_that_left_holds_nobody_up(make_ring: MakeRing) -> None:
    handle = make_ring(2, num_slots=1)
    leaver, stayer = RingReader(handle, 0), RingReader(handle, 1)
    with closing(RingWriter(handle, name="test")) as writer:
        leaver.close()
        for number in range(5):
            writer.write(bytes([number]), timeout=60)
            assert stayer.read() == bytes([number])
        stayer.close()
        with pytest.raises(RingClosed):
            writer.write(b"to nobody", timeout=60)


def test_slow_reader_is_named_in_the_log(
    make_ring: MakeRing, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = make_ring(2, num_slots=2)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with (
        closing(RingWriter(handle, name="plan", warning_interval_seconds=0.05)) as writer,
        closing(RingReader(handle, 0)) as reader,
    ):
        writer.write(b"1")
        writer.write(b"2")
        reader.read()
        assert caplog.text == ""
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            writer.write(b"3", timeout=0.2)
        intervals = (time.monotonic() - began) / 0.05
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= intervals
    assert "plan ring has been full" in lines[0]
    assert "reader 1 is 2 messages behind" in lines[0]


def test_nothing_is_left_in_shared_memory_after_a_kill() -> None:
    code = (
        "import os; from quire.executor.processes.ring import RingWriter; "
        "from quire.executor.processes.ring_memory import create_ring; "
        "writer = RingWriter(create_ring(1), name='x'); writer.write(b'1' * 100_000); os.kill(os.getpid(), 9)"
    )
    before = {name for name in os.listdir("/dev/shm") if "quire" in name}
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert process.returncode == -signal.SIGKILL
    assert {name for name in os.listdir("/dev/shm") if "quire" in name} == before
