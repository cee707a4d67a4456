"""Images and sounds of a prompt: the arrays that a model's tower reads, and the tokens that its rows stand for."""

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from quire.core.wire.prefix_spans import PrefixSpan

Modality = Literal["image", "audio", "video"]

GIVEN_ROWS = "given_rows"
"""The name of an array [num_rows, hidden] or [num_rows, (1 + num_layers) * hidden] that a tower has made elsewhere: the
rows, and those that are added to the outputs of the first layers."""

ROW_IDS = "row_ids"
"""The name of an array [1, num_rows] int64 with the token of each row, of models with several such tokens."""

Run = tuple[int, int]
"""The positions of the first of some neighbouring tokens, and of the one after the last."""


class Array(Struct, array_like=True, frozen=True):
    """An array of numbers, in NumPy's words."""

    dtype: str  # such as "float32"; also "bfloat16"
    shape: tuple[int, ...]
    data: bytes  # little-endian, in C order


class MediaItem(Struct, array_like=True, frozen=True):
    """One image or sound of a prompt.

    The model's tower makes a row of it for each token of `runs`, which replaces the token's embedding. Equal digests
    mean equal rows.
    """

    modality: Modality
    digest: bytes  # of the content, and of what the processor was told
    runs: list[Run]  # positions in the prompt, ascending; the tokens between runs have their own embeddings
    facts: dict[str, Array] = {}  # small arrays, such as an image's grid, which decide the positions of tokens
    arrays: dict[str, Array] = {}  # what the tower reads besides; empty where the rows are made already

    @property
    def start(self) -> int:
        """The position of the first token that has a row."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The position after the last token that has a row."""
        return self.runs[-1][1]

    @property
    def num_rows(self) -> int:
        """Rows that the tower makes."""
        return sum(end - start for start, end in self.runs)

    @property
    def num_bytes(self) -> int:
        """The memory of its arrays."""
        return sum(len(array.data) for arrays in (self.facts, self.arrays) for array in arrays.values())

    def first_row(self, start: int, end: int) -> int | None:
        """Returns the first of the positions `start` to `end` that has a row; None if none has."""
        return next((max(start, first) for first, last in self.runs if max(start, first) < min(end, last)), None)

    def without_arrays(self) -> "MediaItem":
        """The same item, for a receiver that makes no rows of it."""
        return MediaItem(self.modality, self.digest, self.runs, self.facts)


def media_end(items: Sequence[MediaItem]) -> int:
    """Returns the position after the last token with a row; 0 without items."""
    return items[-1].end if items else 0


def spans_of(items: Iterable[MediaItem]) -> list[PrefixSpan]:
    """Returns the runs of all items as prefix spans, of models in which the tokens of an image see each other."""
    spans: list[PrefixSpan] = []
    for start, end in sorted(run for item in items for run in item.runs):
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return spans
