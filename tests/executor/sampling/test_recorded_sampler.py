"""Tokens that recordings choose are the sampler's, and what they cannot choose is left to it."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.core.config.model import LogprobsMode
from quire.core.wire.protocol import NewSlot
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.sampling.recorded_sampler import Choice, ChosenRows, RecordedSampler
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.request_table import RequestTable
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.eager.sampling import EagerSampling
from quire.ops.sampling import RowParameters

VOCAB_SIZE, NUM_SLOTS = 200, 40
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 10},
    {"min_p": 0.05, "presence_penalty": 0.7},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.0},
    {"temperature": 0.5, "min_tokens": 3},
    {"seed": -5, "top_k": 50, "top_p": 0.7, "min_p": 0.01, "repetition_penalty": 0.8, "frequency_penalty": -0.2},
]
PROMPT, OUTPUT = [3, 9, 9, 41], [9, 5, 41, 41, 41, 7]


class RecordableSampling(EagerSampling):
    def is_recordable(self, logits: torch.Tensor) -> bool:
        return True


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(NUM_SLOTS, 64, 16, torch.device("cpu"))


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(NUM_SLOTS, VOCAB_SIZE, [2], ops=EagerBackend(PlainLinear()))


def admit(sampler: Sampler, table: RequestTable, slot: int, **options: Any) -> None:
    params = SamplingParams(**{"seed": slot, "max_tokens": None, **options})
    new = NewSlot(slot, [*PROMPT, *OUTPUT[: slot % 7]], len(PROMPT), [[slot]], params)
    for each in (table, sampler):
        each.admit(new)


def rows_of(
    recorded: RecordedSampler, table: RequestTable, choice: Choice, slots: np.ndarray, positions: np.ndarray
) -> ChosenRows:
    columns = {name: torch.from_numpy(each.values[slots]) for name, each in recorded.columns.items()}
    parameters = RowParameters(torch.from_numpy(slots), torch.from_numpy(positions), **columns)
    places = torch.from_numpy(table.places(slots, positions))
    return ChosenRows(choice, parameters, places, torch.tensor([recorded.next_turn()]))


def test_tokens_are_those_of_the_sampler(sampler: Sampler, table: RequestTable) -> None:
    slots = np.random.default_rng(0).permutation(NUM_SLOTS)[:35]
    for slot in slots.tolist():
        admit(sampler, table, slot, **KINDS[slot % len(KINDS)])
    recorded = RecordedSampler(sampler, RecordableSampling(), table, 35)
    positions = len(PROMPT) + slots % 7 + 3  # past all `min_tokens`
    for turn in range(12):
        logits = 2 * torch.randn(35, VOCAB_SIZE, generator=torch.Generator().manual_seed(turn))
        expected = sampler.sample(logits.clone(), SampleBatch(slots, positions, table))
        choice = recorded.choice(slots, positions)
        assert choice is Choice.ANY
        assert recorded.choose(logits, rows_of(recorded, table, choice, slots, positions))
        token_ids, usable, scores = recorded.tokens(35, choice)
        assert scores is None
        assert token_ids.tolist() == expected.token_ids.tolist()
        assert usable.all()
        assert table.gather(slots, positions).tolist() == token_ids.tolist()
        positions = positions + 1


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_are_those_of_the_sampler(table: RequestTable, mode: LogprobsMode, temperature: float) -> None:
    sampler = Sampler(NUM_SLOTS, VOCAB_SIZE, [2], ops=EagerBackend(PlainLinear()), logprobs_mode=mode)
    slots = np.arange(9)
    for slot in slots.tolist():
        admit(sampler, table, slot, temperature=temperature, logprobs=(None, 0, 3, 20)[slot % 4])
    recorded = RecordedSampler(sampler, RecordableSampling(), table, 12)
    positions = len(PROMPT) + slots % 7
    logits = (2 * torch.randn(9, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).bfloat16()
    expected = sampler.sample(logits.clone(), SampleBatch(slots, positions, table))
    choice = recorded.choice(slots, positions)
    assert choice is (Choice.SCORED if temperature else Choice.SCORED_LIKELIEST)
    assert recorded.choose(logits, rows_of(recorded, table, choice, slots, positions))
    token_ids, usable, scores = recorded.tokens(9, choice)
    taken = sampler.take((token_ids, usable), slots, scores)
    assert taken.logprobs is not None
    assert expected.logprobs is not None
    assert [place for place, _ in taken.logprobs.rows()] == [1, 2, 3, 5, 6, 7]
    assert taken.logprobs.rows() == expected.logprobs.rows()


def test_processed_scores_are_left_to_the_sampler(table: RequestTable) -> None:
    sampler = Sampler(NUM_SLOTS, VOCAB_SIZE, [2], ops=EagerBackend(PlainLinear()), logprobs_mode="processed_logprobs")
    admit(sampler, table, 0, logprobs=2)
    assert RecordedSampler(sampler, RecordableSampling(), table, 2).choice(np.array([0]), np.array([6])) is None


CHOICES: list[tuple[dict[str, Any], Choice | None]] = [
    ({"temperature": 0.0}, Choice.LIKELIEST),
    ({"temperature": 0.0, "top_k": 4, "top_p": 0.5}, Choice.LIKELIEST),
    ({}, Choice.ANY),
    ({"temperature": 0.0, "presence_penalty": 1}, Choice.ANY),
    ({"temperature": 0.0, "min_tokens": 2}, Choice.LIKELIEST),
    ({"temperature": 0.0, "min_tokens": 20}, None),
    ({"logprobs": 0}, Choice.SCORED),
    ({"logprobs": 20, "temperature": 0.0}, Choice.SCORED_LIKELIEST),
    ({"logprobs": 21}, None),
    ({"logprobs": -1}, None),
    ({"logprob_token_ids": [3, 4]}, None),
    ({"logit_bias": {3: 1.0}}, None),
    ({"allowed_token_ids": [3, 4]}, None),
    ({"bad_words_token_ids": [[3]]}, None),
]


@pytest.mark.parametrize(("options", "choice"), CHOICES, ids=str)
def test_what_a_recording_can_choose(
    sampler: Sampler, table: RequestTable, options: dict[str, Any], choice: Choice | None
) -> None:
    admit(sampler, table, 0, temperature=0.0)
    admit(sampler, table, 3, **options)
    recorded = RecordedSampler(sampler, RecordableSampling(), table, 2)
    assert recorded.choice(np.array([0]), np.array([6])) is Choice.LIKELIEST
    assert recorded.choice(np.array([0, 3]), np.array([6, 7])) is choice


def test_the_tokens_of_a_step_stay_while_others_run(sampler: Sampler, table: RequestTable) -> None:
    admit(sampler, table, 0, temperature=0.0)
    recorded = RecordedSampler(sampler, RecordableSampling(), table, 1)
    slots, positions = np.array([0]), np.array([4])
    steps = []
    for token in range(6):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, token] = 1
        assert recorded.choose(logits, rows_of(recorded, table, Choice.LIKELIEST, slots, positions))
        steps.append(recorded.tokens(1, Choice.LIKELIEST).token_ids)
    assert [step.item() for step in steps] == list(range(6))


def test_logits_that_others_serve_better_are_left(sampler: Sampler, table: RequestTable) -> None:
    admit(sampler, table, 0)
    recorded = RecordedSampler(sampler, EagerSampling(), table, 1)
    slots, positions = np.array([0]), np.array([4])
    assert not recorded.choose(torch.zeros(1, VOCAB_SIZE), rows_of(recorded, table, Choice.ANY, slots, positions))
    assert table.gather(slots, positions).tolist() == [0]
