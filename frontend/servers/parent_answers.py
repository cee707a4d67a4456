"""The parent's answers to the questions of its API servers."""

import asyncio

import msgspec

from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.servers.messages import (
    Answer,
    AskedOfParent,
    AskMaker,
    ControlLink,
    FromServer,
    ReadPage,
    TakeLimit,
)
from quire.frontend.servers.shared_entries import SharedStore
from quire.frontend.servers.shared_metrics import SharedMetrics


class ParentAnswers:
    """Answers the servers' questions."""

    def __init__(self, entries: SharedStore, metrics: SharedMetrics, limits: RateLimits) -> None:
        self._entries = entries
        self._metrics = metrics
        self._limits = limits
        self._answering: set[asyncio.Task[None]] = set()

    def on_asked(self, link: ControlLink[FromServer], asked: AskedOfParent) -> None:
        """Answers a question over the link on which it came."""
        if isinstance(asked.question, ReadPage | AskMaker):
            task = asyncio.create_task(self._answer(link, asked.call_id, asked.question))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif isinstance(asked.question, TakeLimit):
            link.send(Answer.of(asked.call_id, self._limits.take_now(*msgspec.structs.astuple(asked.question))))
        else:  # at once: what a server puts must not come behind its end
            link.send(Answer.of(asked.call_id, self._entries.answer(asked.question)))

    async def _answer(self, link: ControlLink[FromServer], call_id: int, question: ReadPage | AskMaker) -> None:
        value = await (self._metrics.page() if isinstance(question, ReadPage) else self._entries.ask(question))
        link.send(Answer.of(call_id, value))
