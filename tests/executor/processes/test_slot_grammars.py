"""Grammars cross the plan ring once while slots are held to them, and every plan arrives with all of its own."""

import asyncio
import os
import random
from pathlib import Path

import msgspec
import pytest

from quire.core.wire.protocol import Grammar, NewSlot, StepPlan, encoder
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.processes.multiproc import MultiProcExecutor
from quire.executor.processes.slot_grammars import SlotGrammars
from tests.executor.doubles import make_config, results_of

MANY = 64


def grammar(name: str, num_bytes: int) -> Grammar:
    return Grammar("guidance", name.encode(), random.Random(name).randbytes(num_bytes), "nowhere")


def plan_of(step_id: int, released: list[int], admitted: dict[int, Grammar | None]) -> StepPlan:
    new = [NewSlot(slot, [1, 2], 2, [[slot]], SamplingParams(), held_to) for slot, held_to in admitted.items()]
    slots = list(admitted)
    return StepPlan(step_id, released, new, slots, [0] * len(slots), [2] * len(slots), [1] * len(slots), [])


class Ring:
    """The sending and the receiving end of a ring, joined by bytes."""

    def __init__(self) -> None:
        self._sender, self._receiver = SlotGrammars(), SlotGrammars()
        self._encoder = encoder()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def pass_on(self, plan: StepPlan) -> int:
        """Asserts that `plan` arrives unchanged; returns its encoded size in bytes."""
        before = msgspec.msgpack.encode(plan)
        message = self._encoder.encode(self._sender.without_known(plan))
        arrived = self._decoder.decode(message)
        self._receiver.complete(arrived)
        assert msgspec.msgpack.encode(arrived) == msgspec.msgpack.encode(plan) == before
        return len(message)


def test_many_slots_with_one_large_grammar_take_its_bytes_once() -> None:
    ring, large = Ring(), grammar("large", 2**20)
    first, rest = (dict.fromkeys(slots, large) for slots in (range(4), range(4, MANY)))
    num_bytes = ring.pass_on(plan_of(0, [], {**first})) + ring.pass_on(plan_of(1, [], {**rest}))
    assert num_bytes < len(large.data) + 200 * MANY


def test_a_grammar_is_sent_again_when_its_last_slot_was_left() -> None:
    ring, held_to = Ring(), grammar("a", 10_000)
    assert ring.pass_on(plan_of(0, [], {0: held_to, 1: held_to})) > 10_000
    assert ring.pass_on(plan_of(1, [0], {0: held_to})) < 1000  # slot 1 is held to it still
    assert ring.pass_on(plan_of(2, [0, 1], {1: held_to})) > 10_000  # what is released goes before what is admitted


@pytest.mark.parametrize("seed", range(5))
def test_every_plan_arrives_whole(seed: int) -> None:
    rng, ring, used = random.Random(seed), Ring(), set[int]()
    kinds = [None, *(grammar(str(index), 1000) for index in range(3))]
    for step in range(300):
        released = rng.sample(sorted(used), rng.randint(0, len(used)))
        used.difference_update(released)
        free = sorted(set(range(8)) - used)
        admitted = {slot: rng.choice(kinds) for slot in rng.sample(free, rng.randint(0, len(free)))}
        used.update(admitted)
        ring.pass_on(plan_of(step, released, admitted))


def test_workers_in_processes_have_the_whole_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    async def test() -> None:
        executor = MultiProcExecutor(make_config(2), factory="tests.executor.doubles:GrammarWorker")
        try:
            await executor.start()
            held_to = Grammar("guidance", b"a", os.urandom(50_000), "nowhere")
            executor.submit(plan_of(0, [], {0: held_to, 1: held_to}))
            executor.submit(plan_of(1, [1], {1: held_to, 2: None}))
            results = await results_of(executor, 2)
            assert [result.token_ids for result in results] == [[[50_000], [50_000]], [[50_000], [0]]]
        finally:
            await executor.close(hung=False)

    asyncio.run(asyncio.wait_for(test(), 60))
