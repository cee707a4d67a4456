"""Imports a library without the large modules that it imports and Quire does not use."""

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
    """Makes `import name` give an empty module while the context is open, unless the real one is loaded already.

    Transformers, for example, takes a second and a hundred megabytes to import. Do not use it while another thread
    imports one of `names`.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _Nothing(name)
    try:
        yield
    finally:
        for name in absent:
            empty = sys.modules.pop(name)
            package, _, attribute = name.rpartition(".")
            if vars(sys.modules.get(package, empty)).get(attribute) is empty:
                delattr(sys.modules[package], attribute)  # else `from package import attribute` would find it later


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """Makes `import name` raise ImportError while the context is open, for libraries that work without the module."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
