"""Imports torch without its Python code for the meta device, which takes a quarter of the import.

Import it before torch; if torch is loaded already, nothing changes. Dry builds use torch's C++ code for tensors without
memory, and call `complete` if that is not enough. So does the first access to a missing attribute of torch, and the
first import of any further module of torch: many need the missing code, and have to be imported after it.
"""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from quire.core.light_import import without

_META = "torch._meta_registrations"

_UNUSABLE = ("Generator",)
"""Attributes that torch lacks until it is complete, because they exist or work only then."""


def complete() -> bool:
    """Imports the missing code. False: it exists, or is being imported."""
    if _META in sys.modules:
        return False
    vars(torch).update(_set_aside)
    importlib.import_module(_META)
    return True


class _Completion(MetaPathFinder, Loader):
    """Completes torch before a further module of it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch.") or name == _META or not complete() or name not in sys.modules:
            return None
        # Completion has imported the module, too. Python would load it again by the module's own spec.
        module = sys.modules[name]
        self._own = module.__spec__
        module.__spec__ = ModuleSpec(name, self)
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


def _complete_for_attribute(name: str) -> Any:
    if name.startswith("__") or not complete():
        return _other_attribute(name)
    return getattr(torch, name)


_is_first = "torch" not in sys.modules
with without(_META) if _is_first else contextlib.nullcontext():
    import torch

_set_aside = {name: vars(torch).pop(name) for name in _UNUSABLE} if _is_first else {}
_other_attribute = torch.__getattr__
if _is_first:
    vars(torch)["__getattr__"] = _complete_for_attribute
    sys.meta_path.insert(0, _Completion())
