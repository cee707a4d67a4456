"""A line-by-line conversation on a terminal: editing, streaming print, Ctrl-C for one answer, Ctrl-D to leave."""

import sys
from collections.abc import Callable, Generator

# A model's text must not move the cursor, rename the window or write to the clipboard.
UNSAFE = {code: None for code in [*range(32), 127, *range(128, 160)] if chr(code) not in "\n\t"}


def print_stream(pieces: Generator[str, None, None]) -> None:
    """Prints pieces as they come, ends the line if anything was printed, and always closes `pieces`.

    Control characters reach a file or a pipe, but not a terminal.
    """
    shield = sys.stdout.isatty()
    began = False
    try:
        for piece in pieces:
            began = True
            print(piece.translate(UNSAFE) if shield else piece, end="", flush=True)
    except BaseException as error:
        if began or (shield and isinstance(error, KeyboardInterrupt)):  # terminals show ^C for it
            print(flush=True)  # the message about it gets its own line
        raise
    else:
        print(flush=True)
    finally:
        pieces.close()


def converse(banner: str, answer: Callable[[str], None]) -> None:
    """Reads lines until the end of input and answers each; Ctrl-C during an answer returns to the prompt."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() editing and history; only a terminal wants it)

        print(banner, file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()  # the next output gets its own line
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        if line.strip():
            answer(line)
