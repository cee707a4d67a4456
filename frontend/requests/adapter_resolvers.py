"""Looks for adapters that requests name and that nobody has loaded: in a folder, on the Hugging Face hub, and by code
of other packages."""

import re
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.core import envs
from quire.core.errors import ConfigError, UnavailableError
from quire.core.file_reads import FileReads
from quire.core.logging import get_logger
from quire.core.wire.adapters import CONFIG_NAME, WEIGHTS_NAMES
from quire.frontend.checkpoint.adapters import LoRARequest, base_of

logger = get_logger(__name__)

_HUB_RETRY_SECONDS = 10.0  # in which the hub may answer again
_LISTING_SECONDS = 60.0  # for which a repository is not asked again what it has

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


class Hub(NamedTuple):
    """How the Hugging Face hub is asked: with a token, True for the one that was saved; downloads go to the folder
    `cache`, or the usual one."""

    token: str | bool | None = None
    cache: str | None = None


class HubResolver:
    """Downloads adapters from repositories of the hub, if they were trained on the served model.

    Requests name an adapter `owner/name`, or `owner/name/folder` for one in a folder of the repository.

    Args:
        repositories: of `QUIRE_LORA_RESOLVER_HF_REPO_LIST`.
        base_names: by which adapter_config.json may know the served model.
    """

    def __init__(self, repositories: Sequence[str], base_names: Sequence[str], hub: Hub) -> None:
        self._repositories = repositories
        self._base_names = base_names
        self._hub = hub
        self._reads = FileReads(envs.read_float("LORA_LOAD_TIMEOUT_S"))
        self._listings: dict[str, _Listing] = {}  # by repository

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        plain = lora_name.rstrip("/")
        for repository in self._repositories:
            inside = plain.removeprefix(repository)
            if plain.startswith(repository) and (not inside or inside.startswith("/")):
                return await self._reads.ask(lora_name, partial(self._find, lora_name, repository, inside.strip("/")))
        return None

    def _find(self, name: str, repository: str, inside: str) -> LoRARequest | None:
        if ".." in Path(inside).parts or not set("*?[]\\").isdisjoint(inside):  # no folder's name, or a pattern
            return None
        listing = self._list(repository)
        if listing is not None and not listing.may_have(inside):
            return None
        path = self._download(repository, inside)
        if path is None or base_of(path / inside) not in self._base_names:
            if listing is not None:
                listing.others.add(inside)
            return None
        return LoRARequest(name, 1, str(path / inside))

    def _list(self, repository: str) -> "_Listing | None":
        """What the hub has said of a repository a short time ago, or says now; None: it does not answer.

        So clients that name adapters which are not there do not make this server ask the hub each time.
        """
        known, now = self._listings.get(repository), time.monotonic()
        if known is not None and now - known.time < _LISTING_SECONDS:
            return known
        import huggingface_hub  # imported here, because most servers do without, and it takes 0.3 s
        from huggingface_hub import errors

        try:
            info = huggingface_hub.HfApi(token=self._hub.token).model_info(repository)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            logger.warning("%s: %s", repository, _first_line(error))
            files = frozenset[str]()
        except Exception as error:  # of the library's HTTP client; the download, which may need no hub, says more
            logger.debug("%s: %s", repository, _first_line(error))
            return None
        else:
            files = frozenset(each.rfilename for each in info.siblings or ())
        self._listings[repository] = found = _Listing(now, files, set())
        return found

    def _download(self, repository: str, inside: str) -> Path | None:
        """The repository's folder here, with the files of an adapter in its folder `inside`; None if there is none."""
        import huggingface_hub  # imported here, because most servers do without, and it takes 0.3 s
        from huggingface_hub import errors

        wanted = [_path(inside, name) for name in (CONFIG_NAME, *WEIGHTS_NAMES)]
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    repository, allow_patterns=wanted, token=self._hub.token, cache_dir=self._hub.cache
                )
            )
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            logger.warning("%s: %s", repository, _first_line(error))
            return None
        except (errors.HfHubHTTPError, OSError) as error:
            raise UnavailableError(
                f"The adapter is not loaded: the hub does not answer for {repository!r} "
                f"({_first_line(error)}). Try again later.",
                retry_after_seconds=_HUB_RETRY_SECONDS,
            ) from error


class _Listing(NamedTuple):
    """A repository of the hub: its files at a `time` in seconds, and folders whose adapters are of other models."""

    time: float
    files: frozenset[str]
    others: set[str]

    def may_have(self, inside: str) -> bool:
        """Returns True if there may be an adapter of the served model in the folder `inside`."""
        return _path(inside, CONFIG_NAME) in self.files and inside not in self.others


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def resolvers_of(base_names: Sequence[str], hub: Hub) -> list[LoRAResolver]:
    """The resolvers that the environment and the installed packages name.

    Raises:
        ConfigError: the folder does not exist, a repository has no name of the hub, or a package's resolver cannot be
            loaded.
    """
    found: list[LoRAResolver] = []
    if (given := envs.read("LORA_RESOLVER_CACHE_DIR")) is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"QUIRE_LORA_RESOLVER_CACHE_DIR: there is no folder {given!r}.")
        found.append(FolderResolver(folder, base_names))
    if repositories := _listed_repositories():
        found.append(HubResolver(repositories, base_names, hub))
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


def _listed_repositories() -> list[str]:
    """Those of `QUIRE_LORA_RESOLVER_HF_REPO_LIST`."""
    named = (envs.read("LORA_RESOLVER_HF_REPO_LIST") or "").split(",")
    repositories = [name.strip() for name in named if name.strip()]
    for name in repositories:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise ConfigError(f"QUIRE_LORA_RESOLVER_HF_REPO_LIST: {name!r} is no repository; each is named owner/name.")
    return repositories
