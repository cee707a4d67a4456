"""The sequences of a request share their prompt in the engine: its ids, and the hashes of its blocks."""

import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from quire.core.kv import block_hashes
from quire.core.kv.hash_functions import hash_function
from quire.core.wire.protocol import EngineRequest, SequenceStart
from tests.core.scheduling.fake_worker import Harness, make_request


def request_of(n: int, prompt_len: int) -> EngineRequest:
    starts = [SequenceStart(str(index), seed=index) for index in range(n)]
    return replace(make_request("a", prompt_len, max_tokens=3), sequences=starts)


def harness_for(prompt_len: int) -> Harness:
    blocks = 2 * prompt_len // 16
    options: dict[str, Any] = {"max_num_batched_tokens": prompt_len + 64, "max_num_seqs": 64, "block_size": 16}
    return Harness(num_pages=blocks, max_model_len=prompt_len + 8, check=False, **options)


def test_a_prompt_takes_memory_once_however_many_sequences_run() -> None:
    """Own token ids would cost each sequence 8 bytes a token; block tables and hashes need one entry for 16 tokens."""
    prompt_len, held = 50_000, {}
    for n in (1, 64):
        harness, wire = harness_for(prompt_len), request_of(n, prompt_len)
        tracemalloc.start()
        harness.scheduler.add(wire)
        for _ in range(2):  # all are admitted
            plan = harness.scheduler.schedule()
            assert plan is not None
            plan.admitted.clear()  # the workers have taken it over
        held[n], _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert harness.scheduler.stats().num_running == n
    assert held[64] - held[1] < 63 * 8 * prompt_len / 4


def test_blocks_of_a_prompt_are_hashed_once_for_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, hash_of = [], hash_function("sha256")

    def count(parent: bytes, *content: bytes) -> bytes:
        if parent:  # not the root's
            hashed.append(content)
        return hash_of(parent, *content)

    monkeypatch.setattr(block_hashes, "hash_function", lambda _: count)
    harness = harness_for(1000)
    assert harness.offer(request_of(64, 1000)) is None
    harness.run()
    assert len(hashed) == 1000 // 16
