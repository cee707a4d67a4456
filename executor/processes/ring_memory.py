"""The memory and the eventfds that the two ends of a ring share. `ring.py` holds the protocol.

    segment:  | head, closed | tail, left (a reader) | ... | slot 0 | slot 1 | ... |
    spill:    messages that do not fit a slot, one 4 GiB window of a sparse file for each slot

Segment and spill are memfds: files without a name, inherited by the processes that need them and freed by the kernel
with the last of these processes, however it ends. Wake-ups are eventfds, which an event loop can watch.
"""

import mmap
import os
import threading

from msgspec import Struct

SEQUENCE_MASK = 0xFFFFFFFF
LINE_BYTES = 64  # one cache line for the words of each process, so that they do not contend
LINE_WORDS = LINE_BYTES // 4
SPILL_STRIDE_BYTES = 1 << 32


class RingHandle(Struct, frozen=True, array_like=True):
    """The inherited file descriptors (same numbers) and the geometry that a process needs to open its end of a ring."""

    segment_fd: int
    spill_fd: int
    space_fd: int  # eventfd: a reader has freed a slot
    message_fds: list[int]  # eventfd of each reader: the writer has published
    num_slots: int  # a power of two
    slot_bytes: int  # payload that fits a slot

    @property
    def fds(self) -> list[int]:
        """Every descriptor, for `subprocess.Popen(pass_fds=...)`."""
        return [self.segment_fd, self.spill_fd, self.space_fd, *self.message_fds]

    def close(self) -> None:
        """Closes the descriptors of this process. Call once, after closing its readers and writers."""
        for fd in self.fds:
            os.close(fd)


def create_ring(
    num_readers: int, *, num_slots: int = 32, slot_bytes: int = 32 * 1024, first_sequence: int = 0
) -> RingHandle:
    """Creates an empty ring for exactly `num_readers` readers. A reader that opens it late misses nothing.

    Memory is taken when a slot is first used. `num_slots` is rounded up to a power of two, which keeps the slot order
    when sequence numbers (from `first_sequence` on) wrap.
    """
    num_slots = 1 << (num_slots - 1).bit_length()
    slot_bytes = -(-slot_bytes // LINE_BYTES) * LINE_BYTES
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    handle = RingHandle(
        segment_fd=os.memfd_create("quire-ring"),
        spill_fd=os.memfd_create("quire-ring-spill"),
        space_fd=os.eventfd(0, flags),
        message_fds=[os.eventfd(0, flags) for _ in range(num_readers)],
        num_slots=num_slots,
        slot_bytes=slot_bytes,
    )
    os.ftruncate(handle.segment_fd, (1 + num_readers) * LINE_BYTES + num_slots * (LINE_BYTES + slot_bytes))
    segment = Segment(handle)
    for line in range(1 + num_readers):
        segment.words[line * LINE_WORDS] = first_sequence & SEQUENCE_MASK
    segment.close()
    return handle


class Segment:
    """The mapped segment: control words by line, slots by sequence number."""

    def __init__(self, handle: RingHandle) -> None:
        self._slot_mask = handle.num_slots - 1
        self._stride = LINE_BYTES + handle.slot_bytes
        self._slots_offset = (1 + len(handle.message_fds)) * LINE_BYTES
        self._map = mmap.mmap(handle.segment_fd, self._slots_offset + handle.num_slots * self._stride)
        self.memory = memoryview(self._map)
        self.words = self.memory[: self._slots_offset].cast("I")
        self._fence_lock = threading.Lock()

    def slot_offset(self, sequence: int) -> int:
        """Returns the byte offset of the slot's header; the payload starts one line later."""
        return self._slots_offset + (sequence & self._slot_mask) * self._stride

    def spill_offset(self, sequence: int) -> int:
        return (sequence & self._slot_mask) * SPILL_STRIDE_BYTES

    def fence(self) -> None:
        """Orders memory accesses before the fence and after it: a release and then an acquire, which no CPU swaps."""
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass

    def close(self) -> None:
        self.words.release()
        self.memory.release()
        self._map.close()
