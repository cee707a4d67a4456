"""Sets of characters as ranges of code points, and how JSON writes them in a string."""

from collections.abc import Callable, Iterable

Ranges = list[tuple[int, int]]
"""Code points from the first to the last of each pair, both included."""

ALL: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
"""Every character that a text may contain, so no surrogates."""

PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
"""Characters that JSON writes as they are."""

ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""The letter after the backslash, by character (RFC 8259, section 7)."""


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same characters as sorted ranges, with touching ranges joined."""
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], high)
        else:
            out.append((low, high))
    return out


def complement(ranges: Ranges) -> Ranges:
    """All characters but these; surrogates are left to `common`."""
    out, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            out.append((start, low - 1))
        start = max(start, high + 1)
    return [*out, (start, 0x10FFFF)] if start <= 0x10FFFF else out


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters in both sets."""
    pairs = ((max(low, first), min(high, last)) for low, high in ranges for first, last in others)
    return [(low, high) for low, high in pairs if low <= high]


_LENGTHS: Ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)]
"""Characters of one to four bytes of UTF-8."""


def by_encoded_length(ranges: Ranges) -> list[Ranges]:
    """The characters of each length in UTF-8, if there are any."""
    return [part for each in _LENGTHS if (part := common(ranges, [each]))]


def has(ranges: Iterable[tuple[int, int]], code: int) -> bool:
    """True if the character is in the set."""
    return any(low <= code <= high for low, high in ranges)


def in_json(ranges: Ranges, written: Callable[[Ranges], str], literal: Callable[[str], str]) -> str:
    """An expression for the characters within a string of JSON. Each has one form: an escape with a letter if possible.

    Args:
        written: writes a class of characters that is not empty.
        literal: writes a text.
    """
    ways = [written(plain)] if (plain := common(ranges, PLAIN)) else []
    letters = [(ord(letter), ord(letter)) for each, letter in ESCAPES.items() if has(ranges, ord(each))]
    if letters:
        ways.append(f"{literal(chr(92))}{written(letters)}")
    for high in (0, 1):
        codes = [low for low in range(16) if has(ranges, code := 16 * high + low) and chr(code) not in ESCAPES]
        if codes:
            digits = [(ord(f"{low:x}"), ord(f"{low:x}")) for low in codes]
            ways.append(f"{literal(f'{chr(92)}u00{high}')}{written(digits)}")
    return f"({'|'.join(ways)})"
