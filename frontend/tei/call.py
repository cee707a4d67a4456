"""One call of a client: the headers of its request, and the times that the headers of its answer report."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from litestar.response.base import ASGIResponse

from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.answers import json_answer
from quire.frontend.outputs import RequestTimes
from quire.frontend.pooling.encoding import Caller, VectorsOutput


class Call:
    """A call, from its begin on.

    Args:
        device: the kind of machine that computes, for the header.
    """

    def __init__(self, headers: ClientHeaders, device: str) -> None:
        self._started = time.perf_counter()
        self._device = device
        self._characters = 0
        self._tokens = 0
        self._reading_seconds = 0.0
        self._times: list[RequestTimes] = []
        self.caller = Caller(reply_id=f"tei-{headers.choose_id(None)}", data_parallel_rank=headers.data_parallel_rank)

    @contextmanager
    def reading(self, inputs: Sequence[str | Sequence[Any]]) -> Iterator[None]:
        """Counts the time of a block that makes tokens of inputs, and their characters; ids count as one each."""
        started = time.perf_counter()
        self._characters += sum(map(len, inputs))
        try:
            yield
        finally:
            self._reading_seconds += time.perf_counter() - started

    def note(self, outputs: Sequence[VectorsOutput]) -> None:
        """Counts the tokens of outputs, and their times in the engine."""
        self._tokens += sum(len(output.prompt_token_ids) for output in outputs)
        self._times += [output.metrics for output in outputs if output.metrics is not None]

    def answer(self, body: Any) -> ASGIResponse:
        """The answer, whose headers tell what it took."""
        return json_answer(body, headers=self.headers())

    def headers(self) -> dict[str, str]:
        """Times are whole milliseconds; those of single inputs are means, as in Text Embeddings Inference."""
        total, count = time.perf_counter() - self._started, max(len(self._times), 1)
        queue = sum(times.time_in_queue or 0.0 for times in self._times)
        work = sum(map(_seconds_of_work, self._times))
        values: dict[str, float | str] = {
            "x-compute-type": self._device,
            "x-compute-time": total,
            "x-compute-characters": str(self._characters),
            "x-compute-tokens": str(self._tokens),
            "x-total-time": total,
            "x-tokenization-time": self._reading_seconds / count,
            "x-queue-time": queue / count,
            "x-inference-time": work / count,
        }
        return {name: each if isinstance(each, str) else str(int(each * 1000)) for name, each in values.items()}


def _seconds_of_work(times: RequestTimes) -> float:
    if times.first_scheduled_time is None or times.finished_time is None:
        return 0.0
    return max(times.finished_time - times.first_scheduled_time, 0.0)
