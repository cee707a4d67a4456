"""`quire chat`: a conversation with the model of a running server."""

import argparse
import sys
from collections.abc import Generator

from quire.frontend.cli.client import AnswerTimes, ServerClient, ServerError, add_client_arguments, add_history_argument
from quire.frontend.cli.dialogue import Dialogue, SlashCommand
from quire.frontend.cli.terminal import Piece, print_stream
from quire.frontend.flags.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="System message that opens the conversation.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Send one message, print the answer and leave.")
    add_history_argument(parser)


def run(args: argparse.Namespace) -> int:
    """The exit code: 1 if a message of a pipe failed."""
    with ServerClient.from_args(args) as client:
        chat = Conversation(client, args.model_name or client.first_model(), args.system_prompt, args.stats)
        if args.quick is not None:
            chat.say(args.quick)
            return 0
        banner = f"{chat.model} at {client.url}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."
        return Dialogue("quire chat", banner, chat.say, chat.commands(), keep_history=not args.no_history).run()


class Conversation:
    """The messages so far, and the server that continues them."""

    def __init__(self, client: ServerClient, model: str, system_prompt: str | None, stats: bool) -> None:
        self.model = model
        self._system_prompt = system_prompt
        self._turns: list[dict[str, str]] = []
        self._client = client
        self._stats = stats

    def commands(self) -> dict[str, SlashCommand]:
        """The slash commands of the conversation."""
        return {
            "clear": SlashCommand("Forget the conversation; the system message stays.", self._clear),
            "system": SlashCommand("Set the system message; without TEXT there is none.", self._set_system, "TEXT"),
        }

    def say(self, text: str) -> None:
        """Sends `text` and prints the answer.

        Both become part of the conversation, an interrupted answer as far as it was printed. A failure keeps neither.
        """
        self._turns.append({"role": "user", "content": text})
        times = AnswerTimes()
        received: list[str] = []
        try:
            print_stream(self._answer(times, received))
        except (ServerError, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and received:
                self._remember(received)
            else:
                self._turns.pop()
            raise
        self._remember(received)
        if times.finish_reason == "length":
            print("(cut off: the answer has as many tokens as the server allows)", file=sys.stderr)
        if self._stats:
            print(times.summary(), file=sys.stderr)

    def _remember(self, received: list[str]) -> None:
        self._turns.append({"role": "assistant", "content": "".join(received)})

    def _answer(self, times: AnswerTimes, received: list[str]) -> Generator[Piece, None, None]:
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        body = {"model": self.model, "messages": [*system, *self._turns]}
        for event in self._client.stream("/chat/completions", body):
            delta = event["choices"][0].get("delta", {}) if event.get("choices") else {}
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            content = delta.get("content") or ""
            times.saw(event, reasoning or content)
            if reasoning:
                yield Piece(reasoning, is_reasoning=True)
            if content:
                received.append(content)
                yield Piece(content)

    def _clear(self, _: str) -> str:
        self._turns.clear()
        return "(forgotten)"

    def _set_system(self, text: str) -> str:
        self._system_prompt = text
        return "(the model reads it from the next message on)" if text else "(no system message)"
