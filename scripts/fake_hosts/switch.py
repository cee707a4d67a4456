"""Carries frames between TAP devices: delays, loses and counts them, and cuts a host off."""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import time
from dataclasses import dataclass, field

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_FRAME_BYTES = 65536


@dataclass
class Port:
    """One end of the switch."""

    fd: int
    is_cut: bool = False
    num_frames: int = 0  # both ways
    num_bytes: int = 0


@dataclass
class Switch:
    """Carries frames between its ports. Call `run` in a separate thread.

    Attributes:
        delay: seconds that each frame takes.
        loss: share of the frames that are lost.
    """

    delay: float = 0.0
    loss: float = 0.0
    ports: dict[int, Port] = field(default_factory=dict)  # by descriptor

    def add(self, name: str) -> Port:
        """A new port, whose other end is the interface `name` of this namespace."""
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
        self.ports[fd] = port = Port(fd)
        return port

    def run(self) -> None:
        """Carries frames until the process ends."""
        numbers = itertools.count()
        places: dict[bytes, Port] = {}  # by address of the interface
        due: list[tuple[float, int, Port, bytes]] = []
        while True:
            left = max(0.0, due[0][0] - time.monotonic()) if due else 0.1
            for fd in select.select(list(self.ports), [], [], left)[0]:
                with contextlib.suppress(OSError):  # nothing more to read, or the host is gone
                    while frame := os.read(fd, _FRAME_BYTES):
                        source = places[frame[6:12]] = self.ports[fd]
                        target = places.get(frame[:6])
                        for port in [target] if target else self.ports.values():
                            if port is not source and not (port.is_cut or source.is_cut):
                                heapq.heappush(due, (time.monotonic() + self.delay, next(numbers), port, frame))
                                for end in (source, port):
                                    end.num_frames += 1
                                    end.num_bytes += len(frame)
            while due and due[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(due)
                if random.random() >= self.loss:
                    with contextlib.suppress(OSError):
                        os.write(port.fd, frame)
