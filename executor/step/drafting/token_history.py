"""Finished outputs, kept for what followed which tokens: a suffix tree in effect, in a bounded memory.

The tokens lie in a ring. Of each pair of neighbouring tokens, a hash chain leads to the places where it stood before,
newest first (as LZ77 finds repetitions). A search walks the chain of the newest pair, and compares what stands before
each place with what stands before the pair.
"""

from collections import deque

import numpy as np

_HASH_BITS = 16
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NOWHERE = -1


def pair_hashes(token_ids: np.ndarray) -> np.ndarray:
    """Hashes of the pairs of neighbours of [n] int64: [n - 1] int64."""
    first, second = token_ids[:-1].astype(np.uint64), token_ids[1:].astype(np.uint64)
    return ((first * np.uint64(1 << 32) + second) * _MULTIPLIER >> np.uint64(64 - _HASH_BITS)).astype(np.int64)


class TokenHistory:
    """Keeps the newest sequences.

    Args:
        capacity: tokens of all sequences.
        max_sequences: older ones are forgotten.
        most_places: of a chain, that a search looks at.
    """

    def __init__(self, capacity: int, max_sequences: int, most_places: int = 64) -> None:
        self._capacity = capacity
        self._max_sequences = max_sequences
        self._most_places = most_places
        self._tokens = np.full(capacity, _NOWHERE, np.int64)
        self._before = np.full(capacity, _NOWHERE, np.int64)  # by place, the last place of a pair with the same hash
        self._newest = np.full(1 << _HASH_BITS, _NOWHERE, np.int64)
        self._end = 0  # places count up; a place's index in the ring is its remainder
        self._starts: deque[int] = deque()

    @property
    def num_bytes(self) -> int:
        """The memory of all arrays, which does not grow."""
        return self._tokens.nbytes + self._before.nbytes + self._newest.nbytes

    def add(self, token_ids: np.ndarray) -> None:
        """Adds a sequence [n] int64, of which only the last tokens are kept if it is too long."""
        token_ids = token_ids[-self._capacity // 2 :]
        if len(token_ids) < 2 or not self._max_sequences:
            return
        places = self._end + np.arange(len(token_ids) + 1)
        self._tokens[places % self._capacity] = [*token_ids, _NOWHERE]  # a border, over which nothing is equal
        hashes, seconds = pair_hashes(token_ids), places[1:-1]
        order = np.argsort(hashes, kind="stable")
        ordered, places_of = hashes[order], seconds[order]
        is_first = np.r_[True, ordered[1:] != ordered[:-1]]
        before = np.where(is_first, self._newest[ordered], np.r_[_NOWHERE, places_of[:-1]])
        self._before[places_of % self._capacity] = before
        self._newest[ordered[np.r_[is_first[1:], True]]] = places_of[np.r_[is_first[1:], True]]
        self._starts.append(self._end)
        self._end += len(token_ids) + 1
        while len(self._starts) > self._max_sequences or self._starts[0] < self._end - self._capacity:
            self._starts.popleft()

    def find(self, newest: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds where the end of `newest` [n] int64 stood before.

        Returns:
            places: [k] int64; right after it.
            lengths: [k] int64; of the equal tokens before these, 2 to `longest`.
        """
        pattern = newest[-longest:]
        oldest = self._starts[0] if self._starts else self._end
        places: list[int] = []
        if len(pattern) > 1:
            place = int(self._newest[pair_hashes(pattern[-2:])[0]])
            while place >= oldest and len(places) < self._most_places:
                places.append(place)
                place = int(self._before[place % self._capacity])
        ends = np.array(places, np.int64)
        back = np.arange(len(pattern))
        is_same = self._tokens[(ends[:, None] - back) % self._capacity] == pattern[::-1]
        is_same &= ends[:, None] - back >= oldest
        lengths = is_same.cumprod(1).sum(1)
        found = lengths > 1
        return ends[found] + 1, lengths[found]

    def following(self, places: np.ndarray, num_tokens: int) -> np.ndarray:
        """Returns the tokens from `places` [k] on: [k, num_tokens] int64, -1 past the ends of sequences."""
        index = places[:, None] + np.arange(num_tokens)
        tokens = np.where(index < self._end, self._tokens[index % self._capacity], _NOWHERE)
        return np.where((tokens != _NOWHERE).cumprod(1).astype(bool), tokens, _NOWHERE)
