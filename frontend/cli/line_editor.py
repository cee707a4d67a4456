"""The line editor at a terminal: messages of many lines, safe pastes, completed commands, and a history on disk."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output


class LineEditor:
    """Reads messages from the terminal.

    Args:
        prog: the program's name, which names the history's file.
        commands: names that are completed after a slash.
        quotes: begin and end a message of several lines.
        keep_history: whether messages are read from and written to the history's file.
    """

    def __init__(self, prog: str, commands: Iterable[str], quotes: str, *, keep_history: bool) -> None:
        history = _history_on_disk(prog) if keep_history else InMemoryHistory()
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            history=history,
            key_bindings=_keys(quotes),
            completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
            complete_while_typing=False,
            reserve_space_for_menu=0,
            enable_suspend=True,
            output=_screen(),
        )

    def read(self) -> str:
        """The next message.

        Raises:
            EOFError: Ctrl-D, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C; what was typed is dropped.
        """
        return self._session.prompt()


def _screen() -> Vt100_Output:
    """The stream for the prompt: stderr if the answers on stdout go to a file."""
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    screen = Vt100_Output.from_pty(stream, term=os.environ.get("TERM"))
    screen.enable_cpr = False  # some terminals never say where the cursor is, and nothing here needs it
    return screen


def _keys(quotes: str) -> KeyBindings:
    """Enter sends, except within open quotes; Alt-Enter begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(quotes) and buffer.text.count(quotes) == 1:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history_on_disk(prog: str) -> History:
    """The history in the user's state folder, readable by the user alone; in memory if there can be no such file."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "quire" / f"{prog.split()[-1]}_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        print(f"(no history: {error.strerror}: {path})", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(path)
