"""Finds the names of modules by their ends: trainers and checkpoints put different components before them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator


class ModuleNames:
    """A set of names with components between dots. A look-up takes as long however many there are.

    Args:
        names: each once.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._by_end: dict[str, list[str]] = defaultdict(list)
        for name in self._names:
            for end in _shorter_ends(name):
                self._by_end[end].append(name)

    def alike(self, name: str) -> list[str]:
        """Returns the names that are the same as `name`, end like it, or are an end of it: only the first, if there is
        one."""
        if name in self._names:
            return [name]
        return self._by_end.get(name, []) + [end for end in _shorter_ends(name) if end in self._names]


def _shorter_ends(name: str) -> Iterator[str]:
    """Yields the name without its first component, without its first two, and so on: `a.b.c` → `b.c`, `c`."""
    _, dot, rest = name.partition(".")
    while dot:
        yield rest
        _, dot, rest = rest.partition(".")
