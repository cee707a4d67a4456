"""A single-writer, many-reader ring of messages in shared memory: bytes in, the same bytes out, in order.

Every reader sees every message. The writer waits for the slowest reader rather than overwrite what it has not read.
Sequence numbers count messages modulo 2**32; message k lies in slot k % num_slots and exists once head has passed k.
Each shared word has one process that writes it, so no atomic read-modify-write is needed: the payload is written
first, the head last. On x86 other processes see stores in that order anyway; elsewhere the fence between them ensures
it.

Sleepers wait on eventfds, so a reader may block in `read` or let an event loop watch its `fileno`. This file must not
know what the messages mean.
"""

import contextlib
import os
import select
import struct
import time
from collections.abc import Callable, Iterator

from quire.core.errors import EngineError
from quire.core.logging import get_logger
from quire.executor.processes.ring_memory import (
    LINE_BYTES,
    LINE_WORDS,
    SEQUENCE_MASK,
    SPILL_STRIDE_BYTES,
    RingHandle,
    Segment,
)

logger = get_logger(__name__)

_SLOT_HEADER = struct.Struct("=II")  # length in bytes; 1 if the payload is in the spill
_CHECK_SECONDS = 1.0  # interval between calls of a waiting side's `check`


class RingClosed(EngineError):
    """The other side is gone: no reader is left, or the writer has closed and every message was read."""


class _Sleeper:
    """Waits on an eventfd until a deadline, calling `check` about once a second."""

    def __init__(self, fd: int, timeout: float | None, check: Callable[[], None] | None) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._check = check
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def sleep(self, longest_seconds: float = 3600.0) -> None:
        """Returns after a signal or `longest_seconds`. Raises TimeoutError at the deadline, and what `check` raises."""
        seconds = longest_seconds if self._check is None else min(longest_seconds, _CHECK_SECONDS)
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            seconds = min(seconds, left)
        self._poll.poll(seconds * 1000)
        if self._check is not None:
            self._check()


def _clear(fd: int) -> None:
    """Clears past signals. Callers must read the shared words after this, not only before."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)


class RingWriter:
    """The writing end; one process, one thread.

    Args:
        name: the ring's name in the log.
        warning_interval_seconds: while a slow reader blocks the writer, a line is logged this often.
    """

    def __init__(self, handle: RingHandle, *, name: str, warning_interval_seconds: float = 60.0) -> None:
        self._handle = handle
        self._name = name
        self._warning_interval_seconds = warning_interval_seconds
        self._segment = Segment(handle)
        self._head: int = self._segment.words[0]
        self._spilled = False
        self._blocked_at: float | None = None  # CLOCK_MONOTONIC seconds
        self._warned_at = 0.0
        self._closed = False

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when a reader frees a slot; see `clear`."""
        return self._handle.space_fd

    def clear(self) -> None:
        """Makes `fileno` quiet until the next slot is freed. Call `try_write` after this, not only before."""
        _clear(self._handle.space_fd)

    def try_write(self, message: bytes) -> bool:
        """Publishes `message` if a slot is free; False when the slowest reader is a whole ring behind.

        Raises:
            RingClosed: this end was closed, or every reader has left.
            ValueError: the message is 4 GiB or longer.
        """
        if len(message) >= SPILL_STRIDE_BYTES:
            raise ValueError(f"A message of {len(message)} bytes is too long for the {self._name} ring (limit 4 GiB).")
        backlogs = self._backlogs()
        if max(backlogs.values()) >= self._handle.num_slots:
            self._note_blocked(backlogs)
            return False
        self._blocked_at = None
        if self._spilled and not any(backlogs.values()):
            os.ftruncate(self._handle.spill_fd, 0)  # frees the memory of long messages
            self._spilled = False
        self._fill_slot(message)
        self._segment.fence()
        self._head += 1
        self._segment.words[0] = self._head & SEQUENCE_MASK
        self._signal_readers()
        return True

    def write(self, message: bytes, *, timeout: float | None = None, check: Callable[[], None] | None = None) -> None:
        """As `try_write`, but waits for a slot.

        Args:
            timeout: seconds; None waits for ever.
            check: called about once a second while waiting; what it raises ends the wait (are the readers alive?).

        Raises:
            TimeoutError: no slot became free in time.
        """
        if self.try_write(message):
            return
        sleeper = _Sleeper(self._handle.space_fd, timeout, check)
        while True:
            self.clear()
            if self.try_write(message):
                return
            sleeper.sleep(self._warning_interval_seconds)

    def close(self) -> None:
        """Marks the ring as closed. Readers can still read published messages. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._segment.words[1] = 1
        self._signal_readers()
        self._segment.close()

    def _backlogs(self) -> dict[int, int]:
        """Unread messages of each reader that has not left."""
        if self._closed:
            raise RingClosed(f"The {self._name} ring is closed.")
        words = self._segment.words
        backlogs = {}
        for index in range(len(self._handle.message_fds)):
            line = (1 + index) * LINE_WORDS
            if not words[line + 1]:
                backlogs[index] = (self._head - words[line]) & SEQUENCE_MASK
        if not backlogs:
            raise RingClosed(f"Every reader has left the {self._name} ring.")
        return backlogs

    def _fill_slot(self, message: bytes) -> None:
        spilled = len(message) > self._handle.slot_bytes
        offset = self._segment.slot_offset(self._head)
        _SLOT_HEADER.pack_into(self._segment.memory, offset, len(message), spilled)
        if spilled:
            self._spilled = True
            self._spill(message)
        else:
            start = offset + LINE_BYTES
            self._segment.memory[start : start + len(message)] = message

    def _spill(self, message: bytes) -> None:
        offset = self._segment.spill_offset(self._head)
        rest = memoryview(message)
        while rest:  # Linux moves at most 2 GiB in one call
            count = os.pwrite(self._handle.spill_fd, rest, offset)
            offset += count
            rest = rest[count:]

    def _signal_readers(self) -> None:
        for fd in self._handle.message_fds:
            os.eventfd_write(fd, 1)

    def _note_blocked(self, backlogs: dict[int, int]) -> None:
        now = time.monotonic()
        if self._blocked_at is None:
            self._blocked_at = self._warned_at = now
        elif now - self._warned_at >= self._warning_interval_seconds:
            self._warned_at = now
            slow = [index for index, backlog in backlogs.items() if backlog >= self._handle.num_slots]
            logger.warning(
                "The %s ring has been full for %.0f s: reader %s is %d messages behind.",
                self._name,
                now - self._blocked_at,
                ", ".join(map(str, slow)),
                self._handle.num_slots,
            )


class RingReader:
    """Reading end number `index`; one process, one thread.

    Args:
        spin_seconds: how long `read` polls for a message before it sleeps. Use at most tens of microseconds, and 0
            where there are no cores to spare.
    """

    def __init__(self, handle: RingHandle, index: int, *, spin_seconds: float = 0.0) -> None:
        self._handle = handle
        self._fd = handle.message_fds[index]
        self._line = (1 + index) * LINE_WORDS
        self._spin_seconds = spin_seconds
        self._segment = Segment(handle)
        self._tail: int = self._segment.words[self._line]
        self._closed = False

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when there may be messages; an event loop then calls `drain`."""
        return self._fd

    def try_read(self) -> bytes | None:
        """Returns the next message, or None when there is none yet.

        Raises:
            RingClosed: this end was closed, or the writer has closed and everything was read.
        """
        if self._closed:
            raise RingClosed("This end of the ring is closed.")
        words = self._segment.words
        closed = words[1]  # read before the head: a message published before closing must not be missed
        self._segment.fence()
        if words[0] == self._tail & SEQUENCE_MASK:
            if closed:
                raise RingClosed("The writer has closed the ring.")
            return None
        self._segment.fence()
        message = self._copy_slot()
        self._segment.fence()
        self._tail += 1
        words[self._line] = self._tail & SEQUENCE_MASK
        os.eventfd_write(self._handle.space_fd, 1)
        return message

    def read(self, *, timeout: float | None = None, check: Callable[[], None] | None = None) -> bytes:
        """As `try_read`, but waits: spins for a short time, then sleeps in the kernel.

        Args:
            timeout: seconds; None waits for ever.
            check: called about once a second while waiting; what it raises ends the wait (is the writer alive?).

        Raises:
            TimeoutError: no message came in time.
        """
        message = self._spin()
        if message is not None:
            return message
        sleeper = _Sleeper(self._fd, timeout, check)
        while True:
            _clear(self._fd)
            message = self.try_read()
            if message is not None:
                return message
            sleeper.sleep()

    def sleep(self, check: Callable[[], None]) -> None:
        """Returns when there may be a message since the last `try_read`, after `wake`, or at intervals.

        Args:
            check: as for `read`.
        """
        _Sleeper(self._fd, None, check).sleep()
        _clear(self._fd)

    def wake(self) -> None:
        """Ends a `sleep`, or the next one; from any thread."""
        os.eventfd_write(self._fd, 1)

    def drain(self) -> Iterator[bytes]:
        """Yields all messages published so far. Never waits, and ends without an error on a closed ring."""
        if self._closed:
            return
        _clear(self._fd)
        with contextlib.suppress(RingClosed):
            while (message := self.try_read()) is not None:
                yield message

    def close(self) -> None:
        """Leaves: the writer no longer waits for this reader. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._segment.words[self._line + 1] = 1
        os.eventfd_write(self._handle.space_fd, 1)
        self._segment.close()

    def _spin(self) -> bytes | None:
        deadline = time.perf_counter() + self._spin_seconds
        while (message := self.try_read()) is None and time.perf_counter() < deadline:
            pass
        return message

    def _copy_slot(self) -> bytes:
        offset = self._segment.slot_offset(self._tail)
        length, spilled = _SLOT_HEADER.unpack_from(self._segment.memory, offset)
        if not spilled:
            start = offset + LINE_BYTES
            return bytes(self._segment.memory[start : start + length])
        offset = self._segment.spill_offset(self._tail)
        parts = []
        while length:
            part = os.pread(self._handle.spill_fd, length, offset)
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)
