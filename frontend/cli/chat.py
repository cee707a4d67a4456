"""`quire chat`: a conversation with the model of a running server."""

import argparse
import sys
from collections.abc import Generator

from quire.frontend.cli.client import AnswerTimes, ServerClient, ServerError, add_client_arguments
from quire.frontend.cli.program import complain
from quire.frontend.cli.terminal import converse, print_stream
from quire.frontend.flags.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="System message that opens the conversation.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Send one message, print the answer and leave.")


def run(args: argparse.Namespace) -> None:
    with ServerClient.from_args(args) as client:
        chat = Conversation(client, args.model_name or client.first_model(), args.system_prompt, args.stats)
        if args.quick is not None:
            chat.say(args.quick)
        else:
            converse(f"{chat.model} at {client.url}. Ctrl-C stops an answer, Ctrl-D leaves.", chat.try_to_say)


class Conversation:
    """The messages so far, and the server that continues them."""

    def __init__(self, client: ServerClient, model: str, system_prompt: str | None, stats: bool) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})
        self._client = client
        self._stats = stats

    def say(self, text: str) -> None:
        """Sends `text` and prints the answer.

        Both become part of the conversation, an interrupted answer as far as it was printed. A failure keeps neither.
        """
        self.messages.append({"role": "user", "content": text})
        times = AnswerTimes()
        received: list[str] = []
        try:
            print_stream(self._answer(times, received))
        except (ServerError, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and received:
                self._remember(received)
            else:
                self.messages.pop()
            raise
        self._remember(received)
        if self._stats:
            print(times.summary(), file=sys.stderr)

    def _remember(self, received: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(received)})

    def try_to_say(self, text: str) -> None:
        """As `say`, but the conversation goes on after an interruption, and after a failure, which is printed."""
        try:
            self.say(text)
        except ServerError as error:
            complain("quire chat", str(error), 1)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)

    def _answer(self, times: AnswerTimes, received: list[str]) -> Generator[str, None, None]:
        body = {"model": self.model, "messages": self.messages}
        for event in self._client.stream("/chat/completions", body):
            delta = event["choices"][0].get("delta", {}) if event.get("choices") else {}
            piece = delta.get("content") or ""
            times.saw(event, piece)
            if piece:
                received.append(piece)
                yield piece
