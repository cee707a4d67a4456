"""Finds the processor that `--io-processor-plugin` names among the installed packages."""

from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.async_llm import AsyncLLM

GROUPS = ("quire.io_processor_plugins", "vllm.io_processor_plugins")


class Renderer:
    """The part of vLLM's renderer that processors use."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as Transformers' own class."""
        return self._llm.get_tokenizer()


def load_processor(llm: AsyncLLM) -> Any:
    """The processor of the plugin that the options or the checkpoint name; None if they name none.

    Raises:
        ConfigError: no package has it, or it cannot be loaded.
    """
    pooling = llm.config.pooling
    name = None if pooling is None else pooling.io_processor_plugin
    if name is None:
        return None
    point = _find(name)
    try:
        return _class_of(point.load())(llm.vllm_config, Renderer(llm))
    except Exception as error:  # code of another package, which may fail in any way
        raise ConfigError(
            f"--io-processor-plugin: {name!r}, which is {point.value}, cannot be loaded: {type(error).__name__}: "
            f"{error}."
        ) from error


def _find(name: str) -> EntryPoint:
    found = [point for group in GROUPS for point in entry_points(group=group)]
    for point in found:
        if point.name == name:
            return point
    names = ", ".join(dict.fromkeys(point.name for point in found)) or "none"
    raise ConfigError(
        f"--io-processor-plugin: no installed package has {name!r} among its entry points {' or '.join(GROUPS)}; those "
        f"that are there: {names}."
    )


def _class_of(loaded: Any) -> Any:
    """The class that an entry point is, or that its function names."""
    named = loaded if isinstance(loaded, type) else loaded()
    return resolve_name(named) if isinstance(named, str) else named
