"""Finds the lines of a batch's input that have an answer already.

An answer belongs to a line with the same digest, wherever the line is now. Equal lines
need an answer each. So requests may share a custom_id, and a line that was changed is answered anew.
"""

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from quire.frontend.batch.files import read_lines
from quire.frontend.batch.lines import digest_of, key_of

MOST_NAMED = 3
"""Repeated ids that the log names."""


def mark_of_digest(digest: str) -> str:
    return f"digest {digest}"


def mark_of_key(key: str) -> str:
    return f"id {key}"


class Hashes:
    """A multiset of texts, at 16 bytes each, so that a million requests fit easily."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._hashes = array("Q", sorted(map(_hash, texts)))
        self._num_taken = array("Q", bytes(8 * len(self._hashes)))  # of equal members, at the place of the first

    def __len__(self) -> int:
        return len(self._hashes)

    def count(self, text: str) -> int:
        """How often the set has `text`."""
        wanted = _hash(text)
        return bisect_right(self._hashes, wanted) - bisect_left(self._hashes, wanted)

    def take(self, text: str) -> bool:
        """Takes one `text` out of the set. Returns False if none is left."""
        wanted = _hash(text)
        first = bisect_left(self._hashes, wanted)
        if first == len(self._hashes):
            return False
        place = first + self._num_taken[first]
        if place >= len(self._hashes) or self._hashes[place] != wanted:
            return False
        self._num_taken[first] += 1
        return True

    @property
    def num_repeated(self) -> int:
        """The number of members that equal an earlier one."""
        return sum(one == other for one, other in pairwise(self._hashes))


class Answers:
    """The good answers of an output file.

    Args:
        marks: one for each answer: of the digest of its line; or of its id, where an earlier version wrote no digest.
    """

    def __init__(self, marks: Iterable[str] = ()) -> None:
        self._marks = Hashes(marks)

    def __len__(self) -> int:
        return len(self._marks)

    def match(self, source: Path) -> "Lines":
        """Matches the answers with the lines of `source`. Each answer is matched once."""
        ids = Hashes(key_of(number, line) for number, line in read_lines(source))
        done = bytearray()
        for number, line in read_lines(source):
            key = key_of(number, line)
            done.append(
                self._marks.take(mark_of_digest(digest_of(line)))
                # Of several requests with one id, nothing tells which of them an answer without digest belongs to.
                or (ids.count(key) == 1 and self._marks.take(mark_of_key(key)))
            )
        repeated = _repeated(source, ids) if ids.num_repeated else []
        return Lines(done, ids.num_repeated, repeated, len(self) - sum(done))


class Lines:
    """The lines of an input that are not blank, in order.

    Attributes:
        num_repeated: lines whose custom_id an earlier line has.
        repeated: some of those ids.
        num_unmatched: answers to no line of the input.
    """

    def __init__(self, done: bytearray, num_repeated: int, repeated: list[str], num_unmatched: int) -> None:
        self._done = done
        self.num_repeated = num_repeated
        self.repeated = repeated
        self.num_unmatched = num_unmatched

    def __len__(self) -> int:
        return len(self._done)

    @property
    def num_answered(self) -> int:
        return sum(self._done)

    def is_answered(self, index: int) -> bool:
        """Returns True for a line that has an answer; for one that was added since, False."""
        return index < len(self._done) and bool(self._done[index])


def _repeated(source: Path, ids: Hashes) -> list[str]:
    found: dict[str, None] = {}
    for number, line in read_lines(source):
        if ids.count(key := key_of(number, line)) > 1:
            found[key] = None
            if len(found) == MOST_NAMED:
                break
    return list(found)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
