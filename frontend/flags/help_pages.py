"""The pages of `--help`: a short one, everything, one group, one option, or a search. Plain text, any width."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches

from msgspec import NODEFAULT

from quire.frontend.flags.declaration import OptionParser
from quire.frontend.flags.ranges import Number

WIDEST = 100
COLUMN = 34  # of the descriptions' start, when there is room
NARROW = 72
BUILTIN_TITLES = {"positional arguments": "Arguments", "options": "Options"}


def canonical(action: argparse.Action) -> str:
    """The first long spelling of an option; empty for a positional argument."""
    names = action.option_strings
    return next((name for name in names if name.startswith("--")), names[0] if names else "")


def width() -> int:
    return max(24, min(WIDEST, shutil.get_terminal_size().columns))


def page(parser: OptionParser, topic: str) -> str:
    """The page on `topic`; the short one when it is empty.

    Raises:
        LookupError: nothing matches; the message suggests similar topics.
    """
    groups = _groups(parser)
    word = topic.strip().lower()
    if not word:
        return _short(parser, groups)
    if word == "all":
        return "\n\n".join([_usage(parser), *(_group(parser, *group) for group in groups)])
    if word == "listgroup":
        return "\n".join(_row(f"{title} ({len(actions)})", doc) for title, doc, actions in groups)
    for title, doc, actions in groups:
        if title.lower() == word:
            return _group(parser, title, doc, actions)
    flag = "--" + word.lstrip("-").replace("_", "-")
    if flag in parser.flags:
        return _option(parser, parser.flags[flag], groups)
    if parser.refusals.find(flag) is not None:
        return _wrap(parser.refusals.describe(flag))
    return _search(parser, word, groups)


Group = tuple[str, str, list[argparse.Action]]


def _groups(parser: OptionParser) -> list[Group]:
    """(title, description, options that help shows) of each group that has any."""
    found = []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if shown:
            title = BUILTIN_TITLES.get(group.title or "", group.title or "")
            found.append((title, group.description or "", shown))
    return found


def _short(parser: OptionParser, groups: list[Group]) -> str:
    struct_titles = {field.group for field in parser.fields.values()}
    own = [action for title, _, actions in groups if title not in struct_titles for action in actions]
    common = [parser.flags[flag] for flag in parser.common]
    own += [action for action in parser._actions if action.required and action not in own]
    parts = [_usage(parser), _wrap(parser.description or "")]
    rows = [_action_row(parser, action) for action in [*own, *(action for action in common if action not in own)]]
    parts.append("\n".join(rows))
    if struct_titles:
        more = [
            ("--help=all", "every option"),
            ("--help=listgroup", "the groups of options"),
            ("--help=CacheConfig", "one group"),
            ("--help=max-num-seqs", "one option"),
            ("--help=WORD", "options that mention a word"),
        ]
        parts.append("\n".join(["More:", *(_row("  " + left, right) for left, right in more)]))
    return "\n\n".join(part for part in parts if part)


def _usage(parser: OptionParser) -> str:
    positionals = []
    for action in parser._actions:
        if not action.option_strings:
            name = str(action.metavar or action.dest)
            positionals.append(f"[{name}]" if action.nargs in ("?", "*") else name)
    required = [
        f"{canonical(action)} {action.metavar or action.dest.upper()}"
        for action in parser._actions
        if action.option_strings and action.required
    ]
    return _wrap(" ".join(["Usage:", parser.prog, *positionals, *required, "[options]"]))


def _group(parser: OptionParser, title: str, doc: str, actions: list[argparse.Action]) -> str:
    heading = _wrap(f"{title}: {doc}" if doc else title)
    return "\n".join([heading, *(_action_row(parser, action) for action in actions)])


def _action_row(parser: OptionParser, action: argparse.Action) -> str:
    return _row("  " + _spelling(parser, action), _description(parser, action))


def _spelling(parser: OptionParser, action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        negated = "--no-" + canonical(action).removeprefix("--")
        return names + (f", {negated}" if negated in parser.flags else "")
    value = action.metavar if isinstance(action.metavar, str) else None
    if value is None:
        value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else _placeholder(action.type)
    if action.nargs in ("+", "*"):
        value += " ..."
    return f"{names} {f'[{value}]' if action.nargs == '?' else value}"


def _placeholder(kind: object) -> str:
    if isinstance(kind, Number):
        return kind.metavar
    return "N" if kind is int else "X" if kind is float else "TEXT"


def _description(parser: OptionParser, action: argparse.Action) -> str:
    text = (action.help or "") % (vars(action) | {"prog": parser.prog})
    default = _default(parser, action)
    is_told = "default" in text.lower() or (default == "unset" and "unset" in text)
    has_one = canonical(action) in parser.fields or default not in ("off", "unset")
    return f"{text} [{default}]" if has_one and not is_told and not action.required else text


def _default(parser: OptionParser, action: argparse.Action) -> str:
    """The default as a command line spells it."""
    flag = canonical(action)
    value = parser.fields[flag].default if flag in parser.fields else action.default
    if value is False or (action.nargs == 0 and value is argparse.SUPPRESS):
        return "off"
    if value in (None, argparse.SUPPRESS, NODEFAULT, {}, []):
        return "unset"
    if value is True:
        return "on"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _option(parser: OptionParser, action: argparse.Action, groups: list[Group]) -> str:
    """Everything about one option."""
    if action.help == argparse.SUPPRESS:  # the --no- twin: show the option itself
        action = next(other for other in parser._actions if other.dest == action.dest and other is not action)
    rows = [_row("  " + _spelling(parser, action), (action.help or "") % vars(action))]
    flag = canonical(action)
    group = next(title for title, _, actions in groups if action in actions)
    facts = [("group", group), ("default", _default(parser, action))]
    if flag in parser.fields:
        facts.append(("in YAML", f"{flag[2:]}: ..."))
        if parser.fields[flag].is_json:
            facts.append(("dotted", f"{flag}.key VALUE, {flag}.list+ ITEM"))
    return "\n".join(rows + [_row(f"    {name}", text) for name, text in facts])


def _search(parser: OptionParser, word: str, groups: list[Group]) -> str:
    found = []
    for title, doc, actions in groups:
        hits = [
            action
            for action in actions
            if word in _spelling(parser, action).lower().replace("_", "-") or word in (action.help or "").lower()
        ]
        if hits:
            found.append(_group(parser, title, doc, hits))
    if found:
        return "\n\n".join(found)
    unsupported: dict[str, list[str]] = {}
    for flag, known in parser.refusals.unsupported.items():
        if word in flag or word in known.reason.lower():
            unsupported.setdefault(known.reason, []).append(flag)
    if unsupported:
        rows = (_wrap(f"{' '.join(flags)}: {reason}") for reason, flags in unsupported.items())
        return "\n".join(["Flags of vLLM's that are not supported:", *rows])
    topics: Iterable[str] = [*(flag[2:] for flag in parser.flags if flag.startswith("--")), *(row[0] for row in groups)]
    near = get_close_matches(word, topics, n=1, cutoff=0.6)
    hint = f"did you mean --help={near[0]}?" if near else "--help=all lists every option."
    raise LookupError(f"no option, group or description matches {word!r}; {hint}")


# ----------------------------------------------------------------------------------------------------------- layout


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, width(), initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False)


def _row(left: str, text: str) -> str:
    """A row with `left`, and `text` to the right of it, or below it when the terminal is narrow or `left` long."""
    columns = width()
    if columns < NARROW:
        return "\n".join(part for part in (_fold(left, columns), _wrap(text, "      ")) if part.strip())
    body = textwrap.wrap(text, columns - COLUMN, break_on_hyphens=False) or [""]
    if len(left) > COLUMN - 2:
        return "\n".join([_fold(left, columns), *(" " * COLUMN + line for line in body if line)])
    return "\n".join([left.ljust(COLUMN) + body[0], *(" " * COLUMN + line for line in body[1:])]).rstrip()


def _fold(left: str, columns: int) -> str:
    """`left` within `columns`; long lists of choices break after a comma."""
    spaced = re.sub(r",(?=\S)", ", ", left) if len(left) > columns else left
    indent = " " * (len(left) - len(left.lstrip()))
    return textwrap.fill(
        spaced.strip(), columns, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
