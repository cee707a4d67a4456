"""Parsers by name: the formats of Quire, and the classes of a plugin."""

from quire.core.errors import ConfigError
from quire.frontend.parsing.answers.filters import ReasoningSource, ToolSource
from quire.frontend.parsing.formats.checkpoint_marks import CheckpointMarks
from quire.frontend.parsing.formats.harmony import Harmony
from quire.frontend.parsing.formats.inkling import InklingBlocks
from quire.frontend.parsing.formats.kept_reasoning import KeptReasoning
from quire.frontend.parsing.formats.muse_glimmer import MuseMessages
from quire.frontend.parsing.formats.reasoning import ReasoningFormat, ReasoningShape
from quire.frontend.parsing.formats.reasoning_formats import REASONING_ALIASES, REASONING_FORMATS
from quire.frontend.parsing.formats.response_template import ResponseTemplate
from quire.frontend.parsing.formats.tool_formats import TOOL_ALIASES, TOOL_FORMATS
from quire.frontend.parsing.plugins import ReasoningParser, ToolParser, load_plugin

HARMONY_TOOLS = "openai"
HARMONY_REASONING = "openai_gptoss"
_IDENTITY = "identity"
TEMPLATES = ("hf", "beam")
_OTHER_REASONING: dict[str, ReasoningShape] = {
    "inkling": InklingBlocks(),
    "minimax_m2_append_think": KeptReasoning(),
    "muse": MuseMessages(shown=("user", "commentary"), thinks=("", "self"), dropped=("developer",)),
    "muse_glimmer": MuseMessages(),
}


def tool_parser_names() -> list[str]:
    """Every name that `--tool-call-parser` takes without a plugin."""
    return sorted((*TOOL_FORMATS, *TOOL_ALIASES, HARMONY_TOOLS, *TEMPLATES))


def reasoning_parser_names() -> list[str]:
    """Every name that `--reasoning-parser` takes without a plugin."""
    return sorted((*REASONING_FORMATS, *_OTHER_REASONING, *REASONING_ALIASES, HARMONY_REASONING, _IDENTITY, *TEMPLATES))


def find_tool_parser(
    name: str | None, plugin: str | None = None, checkpoint: CheckpointMarks | None = None
) -> ToolSource | None:
    """Finds a format, or a plugin's class; None without a name, or if the format depends on a checkpoint not given.

    Raises:
        ConfigError: there is no such parser, or the plugin cannot be loaded.
    """
    added = load_plugin(plugin, ToolParser, "--tool-parser-plugin") if plugin else {}  # type: ignore[type-abstract]
    if name is None or name in added:
        return added[name] if name else None
    if name == HARMONY_TOOLS:
        return Harmony()
    if name in TEMPLATES:
        return ResponseTemplate(checkpoint.response_template, "--tool-call-parser") if checkpoint else None
    form = TOOL_FORMATS.get(TOOL_ALIASES.get(name, name))
    if form is None:
        known = ", ".join(sorted((*tool_parser_names(), *added)))
        raise ConfigError(f"--tool-call-parser: there is no parser {name!r}; there are {known}.")
    return form.with_suffix(checkpoint.suffix) if checkpoint else form


def find_reasoning_parser(
    name: str | None, plugin: str | None = None, checkpoint: CheckpointMarks | None = None
) -> ReasoningSource | None:
    """Finds a format, or a plugin's class; None without a name, for `identity`, or if the checkpoint is not given.

    Raises:
        ConfigError: there is no such parser, or the plugin cannot be loaded.
    """
    flag = "--reasoning-parser-plugin"
    added = load_plugin(plugin, ReasoningParser, flag) if plugin else {}  # type: ignore[type-abstract]
    if name is None or name in added or name == _IDENTITY:
        return added.get(name) if name else None
    name_of_format = REASONING_ALIASES.get(name, name)
    if name_of_format == HARMONY_REASONING:
        return Harmony()
    if name in TEMPLATES:
        return ResponseTemplate(checkpoint.response_template, "--reasoning-parser") if checkpoint else None
    form = REASONING_FORMATS.get(name_of_format) or _OTHER_REASONING.get(name_of_format)
    if form is None:
        known = ", ".join(sorted((*reasoning_parser_names(), *added)))
        raise ConfigError(f"--reasoning-parser: there is no parser {name!r}; there are {known}.")
    return form.with_suffix(checkpoint.suffix) if checkpoint and isinstance(form, ReasoningFormat) else form
