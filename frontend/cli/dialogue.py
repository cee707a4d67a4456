"""Many messages in one run: lines of a pipe, or a conversation at a terminal with commands, Ctrl-C and Ctrl-D."""

import functools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from quire.frontend.cli.client import ServerError
from quire.frontend.cli.command_group import FAILED, complain

COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)  # a path such as /etc/hosts is none
QUOTES = '"""'


class SlashCommand(NamedTuple):
    """A command of the conversation, given as a line that begins with a slash."""

    summary: str
    run: Callable[[str], str | None]
    """Takes the text after the command; returns what to say about it."""
    argument: str = ""


class Dialogue:
    """Reads messages from stdin and passes each to `answer`.

    Args:
        prog: the program's name, for messages and for the history's file.
        banner: a line that opens a conversation at a terminal.
        answer: prints the answer to a message; raises ServerError.
        commands: by name without the slash, besides /help and /exit. Those of a pipe are plain text.
        keep_history: whether what is typed is kept for the next conversation.
    """

    def __init__(
        self,
        prog: str,
        banner: str,
        answer: Callable[[str], None],
        commands: Mapping[str, SlashCommand],
        *,
        keep_history: bool,
    ) -> None:
        self._prog = prog
        self._banner = banner
        self._answer = answer
        self._keep_history = keep_history
        leave = SlashCommand("Leave, as Ctrl-D does.", _leave)
        self._commands = {"help": SlashCommand("Show this.", self._help), **commands, "exit": leave, "quit": leave}

    def run(self) -> int:
        """The exit code once the input ends: 1 if a message of a pipe failed."""
        if not (sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())):
            return max(map(self._try_to_answer, sys.stdin), default=0)
        read = self._reader()
        print(self._banner, file=sys.stderr)
        while True:
            try:
                self._take(read())
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print("(Ctrl-D leaves)", file=sys.stderr)

    def _reader(self) -> Callable[[], str]:
        """Returns a function that reads one message from the terminal. It raises EOFError for Ctrl-D and
        KeyboardInterrupt for Ctrl-C."""
        if os.environ.get("TERM") == "dumb":  # which has no cursor to move
            return functools.partial(input, "> ")
        # Imported here, because only such a terminal needs it.
        from quire.frontend.cli.line_editor import LineEditor

        return LineEditor(self._prog, self._commands, QUOTES, keep_history=self._keep_history).read

    def _take(self, text: str) -> None:
        """Runs the command or answers the message that was typed."""
        match = COMMAND.fullmatch(text.strip())
        if match:
            said = self._run_command(match.group(1), (match.group(2) or "").strip())
            if said:
                print(said, file=sys.stderr)
            return
        try:
            self._try_to_answer(unquoted(text))
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)

    def _try_to_answer(self, text: str) -> int:
        """Answers `text` if it says something; the exit code that this alone would have."""
        try:
            if text.strip():
                self._answer(text.rstrip("\n"))
        except ServerError as error:
            return complain(self._prog, str(error), FAILED)
        return 0

    def _run_command(self, name: str, argument: str) -> str | None:
        command = self._commands.get(name)
        if command is not None:
            return command.run(argument)
        near = get_close_matches(name, self._commands, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them."
        return f"(there is no command /{name}; {hint} A message that begins with a slash goes between {QUOTES}.)"

    def _help(self, _: str) -> str:
        width = max(16, shutil.get_terminal_size().columns - 1)
        keys = {
            "Alt-Enter": f"Begin a new line. A paste may have many, and so may text between {QUOTES} and {QUOTES}.",
            "Ctrl-C": "Stop the answer.",
            "Ctrl-D": "Leave.",
        }
        rows = {f"/{name} {command.argument}".rstrip(): command.summary for name, command in self._commands.items()}
        column = max(map(len, rows | keys)) + 2
        lines = []
        for left, right in (rows | keys).items():
            if width >= 3 * column:
                lines.append(textwrap.fill(left.ljust(column) + right, width, subsequent_indent=" " * column))
            else:
                lines += [left, textwrap.fill(right, width, initial_indent="  ", subsequent_indent="  ")]
        return "\n".join(lines)


def _leave(_: str) -> None:
    raise EOFError


def unquoted(text: str) -> str:
    """`text` without the triple quotes around it."""
    inner = text.strip()
    if len(inner) >= 2 * len(QUOTES) and inner.startswith(QUOTES) and inner.endswith(QUOTES):
        return inner[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text
