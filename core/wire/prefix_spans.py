"""Prefix spans: runs of a prompt's tokens that see each other, as in images and in prompts that are read both ways.

The keys and values of a span's tokens depend on all of them. So a step computes a span whole, or not at all, and a
prefix that requests share ends in none.
"""

from collections.abc import Sequence

PrefixSpan = tuple[int, int]
"""The positions of a span's first token, and of the one after its last. Spans of a prompt ascend and do not overlap."""


def span_around(spans: Sequence[PrefixSpan], position: int) -> PrefixSpan | None:
    """Returns the span that a cut before `position` would divide; None if no span has tokens on both sides."""
    return next((span for span in spans if span[0] < position < span[1]), None)


def undivided(spans: Sequence[PrefixSpan], start: int, num_tokens: int, most: int) -> int:
    """Returns how many of the `num_tokens` tokens from `start` on a step may compute without dividing a span.

    They end before a span that would be divided. If they begin with it, they are all of it, though only up to `most`
    tokens: 0 if it has more.
    """
    span = span_around(spans, start + num_tokens)
    if span is None:
        return num_tokens
    begin, end = span
    if begin > start:
        return begin - start
    return end - start if end - start <= most else 0
