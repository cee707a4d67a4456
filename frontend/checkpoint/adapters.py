"""The adapters that clients may name instead of the model, and those that a program brings."""

import json
import os
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from quire.core import checkpoint_file
from quire.core.config.lora import LoRAConfig
from quire.core.errors import ConfigError, NotFoundError, ParameterError
from quire.core.wire.adapters import CONFIG_NAME, WEIGHTS_NAMES, Adapter, adapter_digest
from quire.core.wire.protocol import PromptEmbeds


class LoRARequest(Struct, frozen=True):
    """An adapter for the requests of a call in Python.

    Attributes:
        lora_name: for the log and the metrics.
        lora_int_id: 1 or more. Requests with the same number and path have the same version of the adapter.
        lora_path: its folder, with adapter_config.json and the weights.
        base_model_name: of the served names, the one that /v1/models gives as its parent; None: the first.
        load_inplace: read the folder again, though an adapter with this number is known.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ParameterError(f"lora_int_id must be 1 or more, got {self.lora_int_id}.", param="lora_int_id")
        if not self.lora_path or not self.lora_name:
            raise ParameterError("lora_name and lora_path must not be empty.", param="lora_path")

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id


class AdapterModule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter of `--lora-modules`."""

    name: str
    path: str
    base_model_name: str | None = None


class FoundAdapter(NamedTuple):
    """An adapter of requests: one that the engine adds to the model, or embeddings that it has before the prompts."""

    adapter: Adapter
    soft_prompt: PromptEmbeds | None = None


class ServedAdapter(Struct, frozen=True):
    """An adapter under its name."""

    adapter: Adapter
    parent: str  # the name of its base model
    created: int  # Unix seconds
    soft_prompt: PromptEmbeds | None = None  # see `FoundAdapter`

    @property
    def root(self) -> str:
        """Its folder."""
        return self.adapter.path


AdapterChoice = Adapter | LoRARequest | str | None
"""The adapter of a request: one that is known, one that a program brings, or a name; None: none."""

_CHOSEN: ContextVar[str | None] = ContextVar("adapter", default=None)


def choose_adapter(name: str | None) -> None:
    """Makes the adapter with this name that of the task that runs, and of the tasks that it starts from now on."""
    _CHOSEN.set(name)


def chosen_adapter() -> str | None:
    """The name of the adapter that the request of the running task names; None: it names the model."""
    return _CHOSEN.get()


class AdapterNames:
    """The adapters that are served, by name.

    Args:
        base_names: of the model, which no adapter may have.
        resolves: names that are not here may be those of adapters all the same, which are looked for.
    """

    def __init__(self, base_names: list[str], *, resolves: bool) -> None:
        self._base_names = base_names
        self._resolves = resolves
        self._served: dict[str, ServedAdapter] = {}

    @property
    def served(self) -> dict[str, ServedAdapter]:
        """All of them, in the order in which they came."""
        return dict(self._served)

    def may_be(self, name: str) -> bool:
        """True if a request may name this adapter."""
        return name in self._served or self._resolves

    def find(self, name: str) -> ServedAdapter | None:
        return self._served.get(name)

    def add(self, found: FoundAdapter, parent: str | None) -> ServedAdapter:
        """Serves an adapter under its name, instead of an earlier one."""
        parent = parent if parent in self._base_names else self._base_names[0]
        served = ServedAdapter(found.adapter, parent, int(time.time()), found.soft_prompt)
        self._served[found.adapter.name] = served
        return served

    def remove(self, name: str) -> None:
        """Serves an adapter no longer. Raises NotFoundError."""
        if self._served.pop(name, None) is None:
            raise NotFoundError(f"The lora adapter {name!r} cannot be found.{self._known()}", param="lora_name")

    def check_new(self, name: str, *, in_place: bool) -> None:
        """Raises ParameterError if the name is taken."""
        if name in self._base_names:
            raise ParameterError(
                f"The lora adapter {name!r} has the name of the served model; choose another.", param="lora_name"
            )
        if name in self._served and not in_place:
            raise ParameterError(
                f"The lora adapter {name!r} is loaded already. Set load_inplace to replace it.", param="lora_name"
            )

    def _known(self) -> str:
        return f" Known are {', '.join(map(repr, self._served))}." if self._served else " There are none."


def read_modules(options: LoRAConfig) -> list[AdapterModule]:
    """The adapters of `--lora-modules` and `--prompt-adapters`: NAME=PATH, an object of JSON, or a list of those.

    Raises:
        ConfigError: a text of another form, a name twice, a folder without an adapter, or the server takes none.
    """
    modules: dict[str, AdapterModule] = {}
    for option, given, wanted in (
        ("--lora-modules", options.lora_modules, "--enable-lora"),
        ("--prompt-adapters", options.prompt_adapters, "--enable-prompt-adapter"),
    ):
        own = [module for text in given or () for module in _read_module(option, text)]
        for module in own:
            if module.name in modules:
                raise ConfigError(f"{option} names {module.name!r} twice; each adapter needs a name of its own.")
            modules[module.name] = module
        if own and not (options.enable_lora or options.enable_prompt_adapter):
            raise ConfigError(f"{option} needs {wanted}.")
        for module in own:
            try:
                _folder_of(module.name, module.path)
            except NotFoundError as error:
                raise ConfigError(f"{option}: {error}") from None
    return list(modules.values())


def _read_module(option: str, text: str) -> list[AdapterModule]:
    if text.lstrip().startswith(("{", "[")):
        try:
            content: Any = json.loads(text)
            many = content if isinstance(content, list) else [content]
            return [msgspec.convert(each, AdapterModule) for each in many]
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{option}: {text!r} must be an object with name and path, and perhaps base_model_name ({error})."
            ) from None
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"{option} takes NAME=PATH or an object of JSON, got {text!r}.")
    return [AdapterModule(name=name, path=path)]


def find_adapter(name: str, path: str) -> Adapter:
    """Reads which version of an adapter is in a folder. Takes a second for each gigabyte.

    Raises:
        NotFoundError: there is no such folder, or no adapter in it.
        ParameterError: its files cannot be read.
    """
    folder = _folder_of(name, path)
    try:
        return Adapter(name, str(folder), adapter_digest(folder), _invocation_of(folder))
    except OSError as error:
        raise ParameterError(f"The adapter {name!r} cannot be read: {error}.", param="lora_path") from None


def _folder_of(name: str, path: str) -> Path:
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    if not folder.is_dir():
        raise NotFoundError(f"The adapter {name!r} is not there: {str(folder)!r} is no folder.", param="lora_path")
    for wanted in ((CONFIG_NAME,), WEIGHTS_NAMES):
        if not any((folder / each).is_file() for each in wanted):
            raise NotFoundError(
                f"The adapter {name!r} is not there: {str(folder)!r} has no {' or '.join(wanted)}.", param="lora_path"
            )
    return folder


def base_of(folder: Path) -> str | None:
    """The name of the model that an adapter in `folder` was trained on; None if there is none that tells."""
    name = _field_of(folder, "base_model_name_or_path")
    return name if isinstance(name, str) else None


def _invocation_of(folder: Path) -> tuple[int, ...]:
    """The tokens that invoke an adapter; none for one of all tokens. The engine refuses what is damaged."""
    tokens = _field_of(folder, "alora_invocation_tokens")
    return tuple(tokens) if isinstance(tokens, list) and {int}.issuperset(map(type, tokens)) else ()


def type_of(folder: Path) -> str:
    """PEFT's name of an adapter's type."""
    return str(_field_of(folder, "peft_type") or "LORA")


def _field_of(folder: Path, name: str) -> Any:
    """A field of an adapter's configuration; None if there is none."""
    try:
        content = checkpoint_file.read_json(folder / CONFIG_NAME)
    except (OSError, ConfigError):
        return None
    return content.get(name) if isinstance(content, dict) else None
