"""`quire complete`: continues texts with the model of a running server."""

import argparse
import sys
from collections.abc import Generator
from typing import Any

from quire.frontend.cli.client import AnswerTimes, ServerClient, add_client_arguments, add_history_argument
from quire.frontend.cli.dialogue import Dialogue
from quire.frontend.cli.terminal import Piece, print_stream
from quire.frontend.flags.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    add_client_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="Most tokens of an answer; OpenAI's API has 16 when unset."
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Complete one text and leave.")
    add_history_argument(parser)


def run(args: argparse.Namespace) -> int:
    """The exit code: 1 if a text of a pipe failed."""
    with ServerClient.from_args(args) as client:
        completer = Completer(client, args.model_name or client.first_model(), args.max_tokens, args.stats)
        if args.quick is not None:
            completer.complete(args.quick)
            return 0
        banner = f"{completer.model} at {client.url}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."
        return Dialogue("quire complete", banner, completer.complete, {}, keep_history=not args.no_history).run()


class Completer:
    """Continues one text at a time, each without the others."""

    def __init__(self, client: ServerClient, model: str, max_tokens: int | None, stats: bool) -> None:
        self.model = model
        self._client = client
        self._limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._stats = stats

    def complete(self, prompt: str) -> None:
        """Prints the continuation of `prompt`."""
        times = AnswerTimes()
        print_stream(self._answer(prompt, times))
        if self._stats:
            print(times.summary(), file=sys.stderr)

    def _answer(self, prompt: str, times: AnswerTimes) -> Generator[Piece, None, None]:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, **self._limit}
        for event in self._client.stream("/completions", body):
            piece = (event["choices"][0].get("text") or "") if event.get("choices") else ""
            times.saw(event, piece)
            if piece:
                yield Piece(piece)
