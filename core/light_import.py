"""Importing a library without the large ones that it names at its top and that are not used here."""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Nothing(ModuleType):
    """A module whose every name is an empty class: enough for base classes, annotations and isinstance."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """While this is open, `import name` gives an empty module, unless the real one is already loaded.

    Transformers takes a second and a hundred megabytes, and whoever imports it for a class that is never met pays all
    of it. Not for use while another thread imports one of `names`.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _Nothing(name)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """While this is open, `import name` raises ImportError: for libraries that can do with less."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
