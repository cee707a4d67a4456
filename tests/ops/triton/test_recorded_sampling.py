"""Tokens that a recording chooses by kernels are those of plain torch, in the table and in the ring."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.eager.sampling import EagerSampling
from quire.ops.sampling import (
    MAX_SCORED,
    RowParameters,
    ScorePlaces,
    TokenPlaces,
    new_scores,
    num_token_bytes,
    read_scores,
    tokens_in,
)
from quire.ops.triton import recorded_sampling
from quire.ops.triton.sampling import TritonSampling
from tests.ops.triton.conftest import DEVICE

EAGER, TRITON = EagerSampling(), TritonSampling()
NUM_SLOTS, COLUMNS = 20, 1500
ROWS = 11
"""An odd number: whether tokens are usable begins at a multiple of 16 bytes."""


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EagerSampling.choose

    def choose(self: EagerSampling, *args: object) -> None:
        assert self is EAGER, "fell back to plain torch"
        plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EagerSampling, "choose", choose)


def random(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(num_rows, size) * 3).to(dtype).to(DEVICE)


def there(values: list[float] | np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(values).to(dtype).to(DEVICE)


def places(size: int, turn: int = 1) -> TokenPlaces:
    """A table of random tokens below `size`; where a row's are not known, of ids that no vocabulary has."""
    memory = there(np.random.default_rng(0).integers(0, size, NUM_SLOTS * COLUMNS + 2), torch.int32)
    table = memory[: NUM_SLOTS * COLUMNS].view(NUM_SLOTS, COLUMNS)
    for row in range(ROWS):
        slot, end = slots()[row], positions()[row]
        table[slot, end:] = 10**6
    ring = torch.zeros(3, -(-num_token_bytes(ROWS) // 16) * 16, dtype=torch.uint8, device=DEVICE)
    index = there(np.array(slots()) * COLUMNS + positions(), torch.int64)
    return TokenPlaces(table, memory, index, ring, there([turn], torch.int64))


def slots() -> list[int]:
    return [(7 * row + 3) % NUM_SLOTS for row in range(ROWS)]


def positions() -> list[int]:
    return [1, 5, 17, 130, 1024, 1400, 33, 64, 2, 90, 7]


def parameters(size: int) -> RowParameters:
    """Rows of all kinds: greedy, drawn, with one limit or several, with penalties, with ids that are not known."""
    f32, i32, i64 = torch.float32, torch.int32, torch.int64
    none = float("-inf")
    return RowParameters(
        slots=there(slots(), i64),
        positions=there(positions(), i64),
        num_unnamed=there([0, 0, 0, 100, 0, 0, 33, 0, 0, 4, 0], i32),
        num_prompt_tokens=there([1, 2, 17, 100, 900, 3, 33, 20, 1, 4, 7], i32),
        starts=there(np.random.default_rng(1).integers(-(2**63), 2**63, ROWS), i64),
        is_greedy=there([1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0], torch.int8),
        temperature=there([1, 1, 0.7, 1, 1.3, 0.3, 2, 1, 1, 5, 0.9], f32),
        log_min_p=there([none, none, -2, none, none, none, -3, none, none, -9, none], f32),
        top_k=there([size, size, size, size, 3, size, 5, 2, size, 8, size], i64),
        top_p=there([1, 1, 1, 1, 1, 0.5, 0.9, 1, 1, 0.8, 1], torch.float64),
        repetition=there([1, 1, 1, 1.3, 1.5, 0.7, 1.2, 1, 1, 1, 1], f32),
        frequency=there([0, 0, 0, 0.2, 0, 0.4, 0, -0.3, 0, 0.1, 0], f32),
        presence=there([0, 0, 0, 0, 0.7, 0.5, 0, 0, -1.2, 0, 0], f32),
    )


def chosen(ops: EagerSampling, logits: Tensor, rows: RowParameters | None) -> list[Tensor]:
    to = places(logits.shape[1])
    before = logits.clone()
    ops.choose(logits, rows, to)
    assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5)), "the logits stay"
    assert not to.ring[[0, 2]].any(), "other turns stay"
    return [to.memory, *(each.clone() for each in tokens_in(to.ring[1], len(logits)))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [8, 520, 4104])
def test_tokens_are_those_of_plain_torch(size: int, dtype: torch.dtype) -> None:
    logits = random(ROWS, size, dtype)
    for rows in (None, parameters(size)):
        memory, token_ids, usable = chosen(TRITON, logits, rows)
        expected, expected_ids, _ = chosen(EAGER, logits, rows)
        assert usable.all()
        assert token_ids.tolist() == expected_ids.tolist()
        assert torch.equal(memory, expected)
        assert memory[places(size).places].tolist() == token_ids.tolist()


def test_penalized_logits_are_those_of_plain_torch() -> None:
    logits, rows, to = random(ROWS, 520, torch.bfloat16), parameters(520), places(520)
    tempered = recorded_sampling.temper(logits, rows, to.table)
    penalized = torch.stack([_penalized(logits[row].float(), rows, to.table, row) for row in range(ROWS)])
    torch.testing.assert_close(tempered, penalized, rtol=1e-6, atol=1e-6)


def _penalized(logits: Tensor, rows: RowParameters, table: Tensor, row: int) -> Tensor:
    """By the formulas, one token at a time."""
    values = logits.tolist()
    first, prompt_end = int(rows.num_unnamed[row]), int(rows.num_prompt_tokens[row])
    tokens = table[int(rows.slots[row]), : int(rows.positions[row])].tolist()
    repetition, frequency, presence = (float(each[row]) for each in (rows.repetition, rows.frequency, rows.presence))
    for token in set(tokens[first:]):
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    output = tokens[max(first, prompt_end) :]
    for token in set(output):
        values[token] -= frequency * output.count(token) + presence
    return torch.tensor(values, device=logits.device) / rows.temperature[row]


def test_a_row_is_chosen_alike_in_any_company() -> None:
    logits, rows, to = random(ROWS, 520, torch.bfloat16), parameters(520), places(520)
    _, together, _ = chosen(TRITON, logits, rows)
    for row in range(ROWS):
        alone = RowParameters(*(each[row : row + 1].clone() for each in rows))
        TRITON.choose(logits[row : row + 1].clone(), alone, to._replace(places=to.places[row : row + 1].clone()))
        assert tokens_in(to.ring[1], 1)[0] == together[row]


def test_unusable_rows() -> None:
    logits, size = random(ROWS, 520, torch.float32), 520
    logits[0, 3], logits[1, 3], logits[2, 5], logits[4] = torch.nan, torch.inf, torch.nan, -torch.inf
    for rows in (None, parameters(size)):
        _, token_ids, usable = chosen(TRITON, logits, rows)
        assert usable.tolist() == [row not in (0, 1, 2, 4) for row in range(ROWS)]
        assert all(0 <= each < size for each in token_ids.tolist())


def test_logits_that_torch_takes() -> None:
    assert not TRITON.is_recordable(random(2, 37, torch.float32))
    assert TRITON.is_recordable(random(2, 40, torch.float32))


def scored(
    ops: EagerSampling, logits: Tensor, rows: RowParameters | None, *, are_logprobs: bool = True
) -> list[Tensor]:
    ring = new_scores(3, ROWS + 2, logits.device)
    to = places(logits.shape[1])._replace(scores=ScorePlaces(ring, are_logprobs))
    ops.choose(logits, rows, to)
    assert not ring[[0, 2]].any(), "other turns stay"
    assert not ring[1, ROWS:].any()
    return list(read_scores(ring[1, :ROWS]))


@pytest.mark.parametrize(
    ("size", "dtype", "are_logprobs"),
    [(24, torch.float16, True), (4104, torch.bfloat16, True), (520, torch.float32, False)],
)
def test_scores_are_those_of_plain_torch(size: int, dtype: torch.dtype, *, are_logprobs: bool) -> None:
    """Many logits in half precision are equal, and their tokens come by their ids."""
    torch.manual_seed(0)
    logits = random(ROWS, size, dtype)
    logits[0] = 0.0
    logits[1, : size // 2] = -torch.inf
    logits[2, 8:16] = -logits[2, 8:16].abs()
    logits[2, 5] = -0.0
    for rows in (None, parameters(size)):
        token_ids, scores, nth = scored(TRITON, logits, rows, are_logprobs=are_logprobs)
        expected_ids, expected, expected_nth = scored(EAGER, logits, rows, are_logprobs=are_logprobs)
        assert token_ids.tolist() == expected_ids.tolist()
        assert nth.tolist() == expected_nth.tolist()
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert token_ids[0, 1:].tolist() == list(range(MAX_SCORED)), "of equal logits"


def test_rows_without_a_token_are_scored_without_faults() -> None:
    logits = random(ROWS, 520, torch.float32)
    logits[0], logits[1, 3], logits[2, 3] = -torch.inf, torch.nan, torch.inf
    token_ids, _, _ = scored(TRITON, logits, None)
    assert ((token_ids >= 0) & (token_ids < 520)).all()
