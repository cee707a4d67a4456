"""Prints a model's output as it comes: the answer to stdout, its reasoning dimmed to stderr."""

import os
import sys
from collections.abc import Generator
from typing import NamedTuple, TextIO

# A model's text must not move the cursor, rename the window or write to the clipboard.
UNSAFE = {code: None for code in [*range(32), 127, *range(128, 160)] if chr(code) not in "\n\t"}
DIM = ("\x1b[2m", "\x1b[22m")
TAGS = ("<think>\n", "\n</think>")


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    is_reasoning: bool = False


def print_stream(pieces: Generator[Piece, None, None]) -> None:
    """Prints pieces as they come, ends the line if anything was printed, and always closes `pieces`.

    Control characters reach a file or a pipe, but not a terminal.
    """
    page = _Page()
    try:
        for piece in pieces:
            page.write(piece)
    except BaseException as error:
        if page.is_begun or (sys.stdout.isatty() and isinstance(error, KeyboardInterrupt)):  # terminals show ^C for it
            page.end()  # the message about it gets its own line
        raise
    else:
        page.end()
    finally:
        pieces.close()


class _Page:
    """Stdout and stderr, and what was written to them last."""

    def __init__(self) -> None:
        self.is_begun = False
        self._in_reasoning = False
        self._open_mark, self._close_mark = DIM if _has_styles(sys.stderr) else TAGS

    def write(self, piece: Piece) -> None:
        text = piece.text
        if piece.is_reasoning and not self._in_reasoning:
            _put(sys.stderr, self._open_mark)
            self._in_reasoning = True
        elif not piece.is_reasoning and self._in_reasoning:
            text = text.lstrip("\n")
            if not text:
                return
            self._end_reasoning()
        self.is_begun = True
        stream = sys.stderr if piece.is_reasoning else sys.stdout
        _put(stream, text.translate(UNSAFE) if stream.isatty() else text)

    def end(self) -> None:
        """Ends the line, and the reasoning of an answer that has nothing else."""
        if self._in_reasoning:
            self._end_reasoning()
        else:
            _put(sys.stdout, "\n")

    def _end_reasoning(self) -> None:
        _put(sys.stderr, self._close_mark + "\n")
        self._in_reasoning = False


def _put(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _has_styles(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
