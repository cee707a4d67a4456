"""The history of finished outputs finds what a plain search finds, within its limits, and forgets the oldest."""

import random

import numpy as np
import pytest

from quire.executor.step.drafting.token_history import TokenHistory


def plain_search(sequences: list[list[int]], newest: list[int], longest: int) -> list[tuple[int, list[int]]]:
    """(length of the equal text, tokens after it) of each place where the end of `newest` stood before."""
    found = []
    for tokens in sequences:
        for end in range(1, len(tokens) + 1):
            length = 0
            while length < min(longest, end, len(newest)) and tokens[end - 1 - length] == newest[-1 - length]:
                length += 1
            if length > 1:
                found.append((length, tokens[end : end + 3]))
    return sorted(found)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_plain_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    history = TokenHistory(capacity=400, max_sequences=6, most_places=1000)
    sequences: list[list[int]] = []
    for _ in range(25):
        tokens = [rng.randrange(4) for _ in range(rng.choice([0, 1, 2, 9, 30]))]
        history.add(np.array(tokens, np.int64))
        sequences = [*sequences, tokens][-60:]
        kept = [each for each in sequences if len(each) > 1][-6:]
        newest = [rng.randrange(4) for _ in range(rng.choice([1, 2, 3, 12]))]
        places, lengths = history.find(np.array(newest, np.int64), 8)
        following = history.following(places, 3)
        found = [
            (length, [token for token in row if token >= 0])
            for length, row in zip(lengths.tolist(), following.tolist(), strict=True)
        ]
        assert sorted(found) == plain_search(kept, newest, 8)


def test_old_tokens_make_room_and_memory_does_not_grow() -> None:
    history = TokenHistory(capacity=100, max_sequences=1000)
    before = history.num_bytes
    for number in range(50):
        history.add(np.arange(10 * number, 10 * number + 9))
    assert history.num_bytes == before
    assert len(history.find(np.array([1, 2]), 8)[0]) == 0  # long gone
    assert len(history.find(np.array([401, 402]), 8)[0]) == 1
    assert history.following(*history.find(np.array([406, 407]), 8)[:1], 4).tolist() == [[408, -1, -1, -1]]
    history.add(np.arange(1000))  # longer than the whole ring: its end is kept
    assert history.following(history.find(np.array([996, 997]), 8)[0], 3).tolist() == [[998, 999, -1]]


def test_no_sequences_are_kept_where_none_may_be() -> None:
    history = TokenHistory(capacity=100, max_sequences=0)
    history.add(np.array([1, 2, 3]))
    assert len(history.find(np.array([1, 2]), 8)[0]) == 0
