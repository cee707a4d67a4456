"""Lets the Transformers library find, as torchvision, the few functions of it that its processors call."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VERSION = "0.26.0"
"""The last one without Lanczos interpolation of tensors, which torch has only since lately."""
_PACKAGES = ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.v2")
_FUNCTIONS = ("torchvision.transforms.functional", "torchvision.transforms.v2.functional")


class _Finder(MetaPathFinder, Loader):
    """Finds the modules, and fills each when it is imported: torch is loaded then, and not before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = name in _PACKAGES or name in _FUNCTIONS
        return ModuleSpec(name, self, is_package=name in _PACKAGES) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _PACKAGES[0]:
            module.__version__ = VERSION  # type: ignore[attr-defined]
        elif module.__name__ != "torchvision.io":
            from quire.frontend.media import image_functions  # loads torch

            own = vars(image_functions)
            vars(module).update({name: own[name] for name in image_functions.NAMES})


def install() -> None:
    """Makes the functions those of torchvision, where that is not installed. To be called before Transformers is
    imported, which looks once."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
