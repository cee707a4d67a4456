"""Looks for adapters that requests name and that nobody has loaded: in a folder, and by code of other packages."""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from quire.core import envs
from quire.core.errors import ConfigError
from quire.core.file_reads import FileReads
from quire.core.logging import get_logger
from quire.frontend.checkpoint.adapters import LoRARequest, base_of

logger = get_logger(__name__)

ENTRY_POINTS = "quire.lora_resolvers"
"""The group of entry points in which an installed package names its resolvers."""


class LoRAResolver(Protocol):
    """Finds adapters by their names. A class without arguments, or a function that makes one, is an entry point."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Returns the adapter of the model with this name; None if there is none."""


class FolderResolver:
    """Finds adapters in the folders of a folder, by their names there, if they were trained on the served model.

    Args:
        folder: of `QUIRE_LORA_RESOLVER_CACHE_DIR`.
        base_names: by which adapter_config.json may know the served model.
    """

    def __init__(self, folder: Path, base_names: Sequence[str]) -> None:
        self._folder = folder.resolve()
        self._base_names = base_names
        self._reads = FileReads(envs.read_float("LORA_LOAD_TIMEOUT_S"))

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return await self._reads.ask(self._folder, partial(self._find, lora_name))

    def _find(self, name: str) -> LoRARequest | None:
        if ".." in Path(name).parts:
            return None
        try:
            folder = (self._folder / name).resolve()
        except (OSError, ValueError):  # a name that no file can have
            return None
        if folder == self._folder or not folder.is_relative_to(self._folder) or base_of(folder) not in self._base_names:
            return None
        return LoRARequest(name, 1, str(folder))


def resolvers_of(base_names: Sequence[str]) -> list[LoRAResolver]:
    """The resolvers that the environment and the installed packages name.

    Raises:
        ConfigError: the folder does not exist, or a package's resolver cannot be loaded.
    """
    found: list[LoRAResolver] = []
    if (given := envs.read("LORA_RESOLVER_CACHE_DIR")) is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"QUIRE_LORA_RESOLVER_CACHE_DIR: there is no folder {given!r}.")
        found.append(FolderResolver(folder, base_names))
    for point in entry_points(group=ENTRY_POINTS):
        try:
            made = point.load()
            found.append(made() if callable(made) else made)
        except Exception as error:  # code of another package, which may fail in any way
            raise ConfigError(
                f"The resolver {point.name!r} of adapters, which is {point.value}, cannot be loaded: "
                f"{type(error).__name__}: {error}."
            ) from error
    return found
