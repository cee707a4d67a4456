"""Loads, replaces and finds the adapters that requests use."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from quire.core import envs
from quire.core.engine.client import EngineClient
from quire.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    NotFoundError,
    ParameterError,
    QuireError,
    UnavailableError,
)
from quire.core.file_reads import FileReads
from quire.core.logging import get_logger
from quire.core.wire.adapters import LATE_REMEDY, LAYER_TYPES, Adapter
from quire.frontend.checkpoint.adapters import (
    AdapterChoice,
    AdapterModule,
    FoundAdapter,
    LoRARequest,
    ServedAdapter,
    find_adapter,
    type_of,
)
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.requests.adapter_resolvers import LoRAResolver
from quire.frontend.requests.soft_prompts import SOFT_PROMPTS, SoftPrompts

logger = get_logger(__name__)

_RETRY_SECONDS = 1.0  # in which the next engine may begin its start
_LATE_RETRY_SECONDS = 10.0  # in which storage may answer again


class Adapters:
    """The adapters of one model. Use from one event loop.

    Args:
        model: keeps their names.
        client: its engines load them.
        modules: those of `--lora-modules`.
        resolvers: look for adapters that are not loaded.
        soft_prompts: reads embeddings before prompts; None: the server takes none.
        media_paths: those of `--default-mm-loras`, each served under the name of its modality.
    """

    def __init__(
        self,
        model: ServedModel,
        client: EngineClient,
        modules: Sequence[AdapterModule] = (),
        resolvers: Sequence[LoRAResolver] = (),
        soft_prompts: SoftPrompts | None = None,
        media_paths: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._client = client
        self._modules = [*modules, *(AdapterModule(name=name, path=path) for name, path in media_paths.items())]
        self._of_media = frozenset(media_paths)
        self._resolvers = resolvers
        self._soft_prompts = soft_prompts
        self._seconds = envs.read_float("LORA_LOAD_TIMEOUT_S")
        self._reads = FileReads(self._seconds)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by name
        self._brought: dict[tuple[int, str], FoundAdapter] = {}  # by programs: number and path

    @property
    def are_served(self) -> bool:
        """True if the server takes adapters of some type."""
        return self._model.adapters is not None

    async def load_modules(self) -> None:
        """Loads the adapters of `--lora-modules`, `--prompt-adapters` and `--default-mm-loras`.

        Raises:
            ConfigError: one of them cannot be used.
        """
        try:
            for module in self._modules:
                served = await self.load(module.name, module.path, parent=module.base_model_name)
                if module.name in self._of_media and served.soft_prompt is not None:
                    raise ConfigError(
                        f"--default-mm-loras: {module.path} is a soft prompt, which goes with text alone."
                    )
        except (ParameterError, NotFoundError, UnavailableError) as error:
            raise ConfigError(f"--lora-modules, --prompt-adapters, --default-mm-loras: {error}") from None

    async def load(
        self,
        name: str,
        path: str,
        *,
        in_place: bool = False,
        unless_served: bool = False,
        parent: str | None = None,
    ) -> ServedAdapter:
        """Serves the adapter in a folder under a name, once it is in the memory of the engines' hosts.

        Requests that run go on with the version that they began with.

        Args:
            in_place: it may replace one of the same name.
            unless_served: one of the same name stays, and is returned.

        Raises:
            ParameterError: the name is taken, or the adapter does not fit the model.
            NotFoundError: there is no adapter.
            UnavailableError: an engine ended meanwhile, or the files take too long.
        """
        async with self._locks[name]:
            names = self._model.adapters
            if names is None:
                raise ParameterError(
                    "The server takes no adapters; start it with --enable-lora, or with --enable-prompt-adapter for "
                    "soft prompts.",
                    param="lora_name",
                )
            if unless_served and (served := names.find(name)) is not None:
                return served  # another request has brought it meanwhile
            names.check_new(name, in_place=in_place)
            found = await self._read(name, path)
            if found.soft_prompt is None:
                await self._prepare(found.adapter)
            served = names.add(found, parent)
            logger.info("adapter     %s from %s", name, found.adapter.path)
            return served

    def unload(self, name: str) -> None:
        """Serves an adapter no longer; requests that run end as they would. Raises NotFoundError."""
        if self._model.adapters is None:
            raise NotFoundError(f"The lora adapter {name!r} cannot be found: there are none.", param="lora_name")
        self._model.adapters.remove(name)

    async def resolve(self, choice: AdapterChoice) -> FoundAdapter | None:
        """The adapter that a request uses.

        Raises:
            NotFoundError: there is none of this name.
            ParameterError: the adapter cannot be used, or the engine takes none.
            UnavailableError: as in `load`.
        """
        if choice is None or isinstance(choice, Adapter):
            return None if choice is None else FoundAdapter(choice)
        if self._model.adapters is None:
            raise ParameterError(
                "lora_request needs an engine that takes adapters; start it with enable_lora.", param="lora_request"
            )
        if isinstance(choice, LoRARequest):
            return await self._bring(choice)
        if not isinstance(choice, str):
            raise ParameterError(
                f"lora_request must be a LoRARequest, not {type(choice).__name__}.", param="lora_request"
            )
        served = self._model.adapters.find(choice) or await self._search(choice)
        if served is None:
            raise self._model.not_found(choice)
        return FoundAdapter(served.adapter, served.soft_prompt)

    def default_for(self, modalities: Collection[str]) -> FoundAdapter | None:
        """The adapter of a request that names none and has items of some modalities: that of the only one with one."""
        own = self._of_media.intersection(modalities)
        names = self._model.adapters
        served = names.find(next(iter(own))) if names is not None and len(own) == 1 else None
        return None if served is None else FoundAdapter(served.adapter, served.soft_prompt)

    async def bring(self, request: LoRARequest) -> Adapter:
        """Loads the adapter that a program brings, so that it is there when a request comes. Errors as `resolve`."""
        found = await self.resolve(request)
        assert found is not None
        if found.soft_prompt is None:
            await self._prepare(found.adapter)
        return found.adapter

    def forget(self, lora_int_id: int) -> bool:
        """Forgets the adapters that programs brought with a number. Returns True if there was one."""
        known = [key for key in self._brought if key[0] == lora_int_id]
        for key in known:
            del self._brought[key]
        return bool(known)

    @property
    def brought(self) -> set[int]:
        """The numbers of the adapters that programs brought."""
        return {number for number, _ in self._brought}

    async def _bring(self, request: LoRARequest) -> FoundAdapter:
        key = request.lora_int_id, request.lora_path
        async with self._locks[request.lora_path]:
            if key not in self._brought or request.load_inplace:
                found = await self._read(request.lora_name, request.lora_path)
                self._brought[key] = found
            return self._brought[key]

    async def _search(self, name: str) -> ServedAdapter | None:
        """Asks the resolvers for an adapter, and loads the first that they find."""
        for resolver in self._resolvers:
            try:
                async with asyncio.timeout(self._seconds):
                    found = await resolver.resolve_lora(self._model.name, name)
            except QuireError:
                raise
            except TimeoutError as error:
                raise _late(name, str(error) or f"a resolver took more than {self._seconds:g} s.") from None
            except Exception:  # code of another package, which may fail in any way
                logger.exception("a resolver failed to look for the adapter %s", name)
                continue
            if found is not None:
                return await self.load(name, found.lora_path, unless_served=True, parent=found.base_model_name)
        return None

    async def _read(self, name: str, path: str) -> FoundAdapter:
        try:
            return await self._reads.ask(path, partial(self._find, name, path))
        except TimeoutError as error:
            raise _late(name, str(error)) from None

    def _find(self, name: str, path: str) -> FoundAdapter:
        adapter = find_adapter(name, path)
        folder = Path(adapter.path)
        kind = type_of(folder)
        if kind not in (*LAYER_TYPES, *SOFT_PROMPTS):
            raise ParameterError(
                f"The adapter {name!r} is of the type {kind!r}, which is not served; "
                f"{', '.join((*LAYER_TYPES, *SOFT_PROMPTS))} are.",
                param="lora_path",
            )
        if kind in SOFT_PROMPTS:
            if self._soft_prompts is None:
                raise ParameterError(
                    f"The adapter {name!r} is a soft prompt; start the server with --enable-prompt-adapter.",
                    param="lora_path",
                )
            return FoundAdapter(adapter, self._soft_prompts.read(name, folder))
        if not self._model.takes_adapters:
            raise ParameterError(
                f"The adapter {name!r} changes the model's layers; start the server with --enable-lora.",
                param="lora_path",
            )
        return FoundAdapter(adapter)

    async def _prepare(self, adapter: Adapter) -> None:
        try:
            await self._client.prepare_adapter(adapter)
        except EngineDeadError:
            raise
        except EngineError as error:
            raise UnavailableError(
                f"The adapter {adapter.name!r} is not loaded: {error} Try again.", retry_after_seconds=_RETRY_SECONDS
            ) from None


def _late(name: str, why: str) -> UnavailableError:
    """The error for an adapter whose files take too long."""
    return UnavailableError(
        f"The adapter {name!r} is not loaded: {why} {LATE_REMEDY}",
        retry_after_seconds=_LATE_RETRY_SECONDS,
    )
