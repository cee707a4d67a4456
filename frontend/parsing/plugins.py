"""Parsers from a user's Python file, for `--tool-parser-plugin` and `--reasoning-parser-plugin`.

The file defines a class for each parser:

    from quire.frontend.parsing.events import TextDelta
    from quire.frontend.parsing.plugins import ToolParser

    class MyParser(ToolParser):
        name = "my_model"

        def push(self, text):
            return [TextDelta(text)]
"""

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from quire.core.errors import ConfigError
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from quire.frontend.parsing.reader import Sink, TextEnd
from quire.frontend.parsing.tools import Tool


class ToolParser(ABC):
    """Splits one sequence's text into calls and content. Subclasses set `name` and define `push`.

    Attributes:
        name: the parser's name for `--tool-call-parser`.
        markers: special tokens that the parser must see in the text.
    """

    name: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """Takes the next piece of text; returns `TextDelta` and the events of calls, in order."""

    def finish(self) -> list[Event]:
        """Ends the text; returns the events that were held back."""
        return []


class ReasoningParser(ABC):
    """Splits one sequence's text into reasoning and content. Subclasses set `name` and define `push`.

    Attributes:
        name: the parser's name for `--reasoning-parser`.
        markers: special tokens that the parser must see in the text.
    """

    name: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, prompt_text: str) -> None:
        self.prompt_text = prompt_text

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """Takes the next piece of text; returns `ReasoningDelta` and `TextDelta`, in order."""

    def finish(self) -> list[Event]:
        """Ends the text; returns the events that were held back."""
        return []


class PluginFilter:
    """A filter that runs a plugin's parser and counts its calls.

    Args:
        content: takes the parser's content.
    """

    def __init__(self, parser: ToolParser | ReasoningParser, log: EventLog, content: Sink) -> None:
        self._parser = parser
        self._log = log
        self._content = content

    def push(self, text: str) -> None:
        """Takes the next piece of text."""
        self._write(self._parser.push(text))

    def finish(self, by: TextEnd) -> None:
        """Ends the text."""
        self._write(self._parser.finish())

    def _write(self, events: list[Event]) -> None:
        log = self._log
        for event in events:
            match event:
                case TextDelta(text=text):
                    self._content(text)
                case ReasoningDelta(text=text):
                    log.reasoning(text)
                case ToolCallStart(id=call_id, name=name):
                    log.call_ends()
                    log.call_starts(name, call_id)
                case ToolCallArguments(text=text):
                    log.arguments(text)
                case ToolCallEnd():
                    log.call_ends()


Plugin = TypeVar("Plugin", type[ToolParser], type[ReasoningParser])


def load_plugin(path: str, base: Plugin, flag: str) -> dict[str, Plugin]:
    """The subclasses of `base` that the file at `path` defines, by name.

    Raises:
        ConfigError: the file cannot be run, defines no subclass, or a subclass does not define `push`.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{flag}: there is no file {path!r}.")
    spec = importlib.util.spec_from_file_location(f"quire_plugin_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag}: {path!r} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{flag}: {path!r} fails: {type(error).__name__}: {error}") from error
    found = {
        each.name: each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, base) and each is not base and each.name
    }
    if not found:
        raise ConfigError(f"{flag}: {path!r} defines no subclass of {base.__name__} with a name.")
    for each in found.values():
        if inspect.isabstract(each):
            raise ConfigError(f"{flag}: {each.__name__} in {path!r} does not define push.")
    return found
