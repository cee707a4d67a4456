"""Calls that workers are sent, and their answers."""

import asyncio

import pytest

from quire.core.errors import EngineError
from quire.core.wire.protocol import WorkerAnswer
from quire.core.wire.rank import Rank
from quire.executor.processes.pending_calls import PendingCalls


def test_an_answer_that_comes_after_another_worker_has_failed_is_for_nobody() -> None:
    async def test() -> None:
        calls = PendingCalls(2)
        call, answer = calls.open("sleep", b"")
        calls.add(WorkerAnswer(call.call_id, Rank(), b"1"))
        calls.fail(EngineError("Worker tp1 failed."))
        calls.add(WorkerAnswer(call.call_id, Rank(tensor=1), b"2"))
        with pytest.raises(EngineError, match="tp1"):
            await answer
        with pytest.raises(EngineError, match="tp1"):
            calls.open("sleep", b"")

    asyncio.run(test())
