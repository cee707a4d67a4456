"""N-grams: the continuation that a plain search finds, for rows of any length."""

import random

import pytest
import torch

from quire.executor.step.drafting.ngram import continue_ngrams


def plain_search(known: list[int], shortest: int, longest: int, num_drafts: int) -> list[int]:
    """vLLM's rule: the longest n-gram before the end, and the earliest of equal ones."""
    for length in range(min(longest, len(known) - 1), shortest - 1, -1):
        for start in range(len(known) - length):
            if known[start : start + length] == known[-length:]:
                return known[start + length : start + length + num_drafts]
    return []


@pytest.mark.parametrize("seed", range(30))
def test_continuations_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    shortest, num_drafts = rng.randrange(1, 4), rng.randrange(1, 9)
    longest = shortest + rng.randrange(4)
    rows = [[rng.randrange(rng.choice([2, 3, 9])) for _ in range(rng.choice([1, 2, 5, 17, 40]))] for _ in range(7)]
    num_columns = max(map(len, rows)) + rng.randrange(3)
    tokens = torch.randint(0, 9, (len(rows), num_columns), dtype=torch.int32)  # old tokens stand behind the known ones
    for row, known in enumerate(rows):
        tokens[row, : len(known)] = torch.tensor(known)
    asked = torch.tensor([rng.random() < 0.8 for _ in rows])
    lengths = torch.tensor([len(known) for known in rows])
    found = continue_ngrams(tokens, lengths, asked, shortest, longest, num_drafts)
    for row, known in enumerate(rows):
        expected = plain_search(known, shortest, longest, num_drafts) if asked[row] else []
        assert found.token_ids[row, : found.num_drafts[row]].tolist() == expected
