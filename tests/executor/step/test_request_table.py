"""The slot table and the flat tensors made from it, against loops over single tokens."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.step.input_batch import build_input_batch
from quire.executor.step.request_table import RequestTable

BLOCK_SIZE = 4


@dataclass
class Row:
    """One request as plain lists."""

    token_ids: list[int]
    num_prompt_tokens: int
    pages: list[int]
    num_computed: int = 0


@dataclass
class World:
    """A random scheduler: admits, grows and releases requests, and knows the table's expected content."""

    rng: random.Random
    num_slots: int = 9
    rows: dict[int, Row] = field(default_factory=dict)
    num_steps: int = 0

    def plan(self) -> StepPlan:
        rng = self.rng
        released = [slot for slot in self.rows if rng.random() < 0.15]
        for slot in released:
            del self.rows[slot]
        admitted = []
        for slot in range(self.num_slots):
            if slot not in self.rows and rng.random() < 0.4:
                token_ids = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
                pages = self._pages(len(token_ids) // BLOCK_SIZE + 1)
                row = self.rows[slot] = Row(token_ids, rng.randint(1, len(token_ids)), pages)
                admitted.append(NewSlot(slot, row.token_ids[:], row.num_prompt_tokens, [pages[:]], SamplingParams()))
        chosen = rng.sample(sorted(self.rows), rng.randint(0, len(self.rows)))
        counts = [rng.randint(1, len(self.rows[s].token_ids) - self.rows[s].num_computed) for s in chosen]
        appended = []
        for slot in chosen:
            row = self.rows[slot]
            if len(row.token_ids) // BLOCK_SIZE >= len(row.pages):
                new = self._pages(rng.randint(1, 2))
                row.pages += new
                appended.append((slot, [new]))
        self.num_steps += 1
        starts = [self.rows[s].num_computed for s in chosen]
        wanted = [int(a + b == len(self.rows[s].token_ids)) for s, a, b in zip(chosen, starts, counts, strict=True)]
        return StepPlan(self.num_steps, released, admitted, chosen, starts, counts, wanted, appended)

    def _pages(self, num_pages: int) -> list[int]:
        return [self.rng.randrange(10_000) for _ in range(num_pages)]


@pytest.mark.parametrize("seed", range(5))
def test_random_plans_against_a_loop_over_tokens(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    table = RequestTable(world.num_slots, 512, BLOCK_SIZE, torch.device("cpu"))
    for _ in range(60):
        plan = world.plan()
        table.release(plan.released)
        for new in plan.admitted:
            table.admit(new)
        for slot, page_ids in plan.appended_pages:
            table.append_pages(slot, page_ids)
        if not plan.slots:
            continue
        batch = build_input_batch(plan, table)
        token_ids, positions, mapping, ends = [], [], [], []
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            row = world.rows[slot]
            for position in range(start, start + count):
                token_ids.append(row.token_ids[position])
                positions.append(position)
                mapping.append(row.pages[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            row.num_computed += count
            ends.append(len(token_ids) - 1)
        assert batch.token_ids.tolist() == token_ids
        assert batch.positions.tolist() == positions
        assert batch.pages[0].slot_mapping.tolist() == mapping
        assert batch.num_wanted.tolist() == plan.num_wanted
        assert batch.wanted_tokens.tolist() == [end for end, num in zip(ends, plan.num_wanted, strict=True) if num]
        assert batch.query_lens.tolist() == plan.num_scheduled
        assert batch.seq_lens.tolist() == [world.rows[slot].num_computed for slot in plan.slots]
        for slot, seq_len, pages in zip(plan.slots, batch.seq_lens, batch.pages[0].block_tables, strict=True):
            num_pages = -(-seq_len // BLOCK_SIZE)
            assert pages[:num_pages].tolist() == world.rows[slot].pages[:num_pages]
        slots = [slot for slot, wanted in zip(plan.slots, plan.num_wanted, strict=True) if wanted]
        assert batch.wanted_slots.tolist() == slots
        assert table.num_prompt_tokens[slots].tolist() == [world.rows[slot].num_prompt_tokens for slot in slots]
        new_ids = [rng.randrange(1000) for _ in slots]
        table.write(batch.wanted_slots, batch.wanted_positions, torch.tensor(new_ids, dtype=torch.int64))
        for slot, token in zip(slots, new_ids, strict=True):
            world.rows[slot].token_ids.append(token)


def test_the_token_table_grows_with_the_longest_request() -> None:
    table = RequestTable(3, 100_000, 16, torch.device("cpu"))
    columns = table.token_ids.shape[1]
    assert columns < 10_000
    tokens = list(range(20_000))
    short = NewSlot(0, [5, 6, 7], 3, [[0]], SamplingParams())
    long = NewSlot(2, tokens, 20_000, [list(range(1250))], SamplingParams())
    table.admit(short)
    table.admit(long)
    assert table.gather(np.array([0, 2, 2]), np.array([2, 0, 19_999])).tolist() == [7, 0, 19_999]
    edge = table.token_ids.shape[1]
    table.write(np.array([1]), np.array([edge]), torch.tensor([77]))
    assert table.gather(np.array([1, 2]), np.array([edge, 19_999])).tolist() == [77, 19_999]
