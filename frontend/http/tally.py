"""What the servers of one command hold together: connections, and bytes of bodies."""

import mmap
import os
from typing import NamedTuple, Self

_BYTES = 8


class Tally:
    """A sum over several processes. Each changes its own place in memory that they share, and reads the sum of all.

    No lock is taken, so a sum may lack what others are adding at that moment.

    Args:
        places: 64-bit integers, one for each process; one of this process alone when None.
        own: the number of this process's place.
    """

    def __init__(self, places: memoryview | None = None, own: int = 0) -> None:
        self._places = memoryview(bytearray(_BYTES)).cast("q") if places is None else places
        self._own = own

    @property
    def total(self) -> int:
        """The sum of all places."""
        return sum(self._places)

    def add(self, amount: int) -> None:
        """Changes this process's place."""
        self._places[self._own] += amount

    def clear(self) -> None:
        """Sets the place to zero, as its process has ended."""
        self._places[self._own] = 0


class Holdings(NamedTuple):
    """Tallies of what a server holds, each kept together with the other servers of its command."""

    connections: Tally
    body_bytes: Tally

    @classmethod
    def alone(cls) -> Self:
        """Those of the only server."""
        return cls(Tally(), Tally())

    @classmethod
    def shared(cls, memory: int, num_servers: int, own: int) -> Self:
        """Those of server number `own`, in the file of memory with this descriptor, from `memory_of_holdings`."""
        places = memoryview(mmap.mmap(memory, len(cls._fields) * num_servers * _BYTES)).cast("q")
        return cls(*(Tally(places[start : start + num_servers], own) for start in range(0, len(places), num_servers)))


def memory_of_holdings(num_servers: int) -> int:
    """The descriptor of a file of memory with zeros, for `Holdings.shared` in each of the servers."""
    memory = os.memfd_create("quire-holdings")
    os.ftruncate(memory, len(Holdings._fields) * num_servers * _BYTES)
    return memory
