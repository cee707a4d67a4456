"""`quire complete`: continues texts with the model of a running server."""

import argparse
import sys
from collections.abc import Generator
from typing import Any

from quire.frontend.cli.client import AnswerTimes, ServerClient, ServerError, add_client_arguments
from quire.frontend.cli.program import complain
from quire.frontend.cli.terminal import converse, print_stream
from quire.frontend.flags.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="Most tokens of an answer.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Complete one text and leave.")


def run(args: argparse.Namespace) -> None:
    with ServerClient.from_args(args) as client:
        completer = Completer(client, args.model_name or client.first_model(), args.max_tokens, args.stats)
        if args.quick is not None:
            completer.complete(args.quick)
        else:
            converse(f"{completer.model} at {client.url}. Ctrl-C stops, Ctrl-D leaves.", completer.try_to_complete)


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

    def try_to_complete(self, prompt: str) -> None:
        """As `complete`, but the next prompt may follow an interruption, or a failure, which is printed."""
        try:
            self.complete(prompt)
        except ServerError as error:
            complain("quire complete", str(error), 1)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)

    def _answer(self, prompt: str, times: AnswerTimes) -> Generator[str, None, None]:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, **self._limit}
        for event in self._client.stream("/completions", body):
            piece = (event["choices"][0].get("text") or "") if event.get("choices") else ""
            times.saw(event, piece)
            if piece:
                yield piece
