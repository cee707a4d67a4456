"""When words were said: from the alignment of tokens with the sound to words with times.

The way is that of OpenAI's Whisper (arXiv:2212.04356) and of Transformers' `return_timestamps="word"`. The cheapest
monotonic path through the alignment (dynamic time warping) gives each token its time. Tokens become words at spaces, or
characters where a language has no spaces between words.
"""

from collections.abc import Callable, Sequence

import numpy as np

from quire.frontend.audio.answers import Word
from quire.frontend.audio.segments import ClipText, spans_of
from quire.frontend.checkpoint.speech_tokens import SECONDS_PER_TIMESTAMP, SpeechTokens

_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BEFORE, _BEHIND = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word behind it, or before it."""
_UNFINISHED = "�"

Decode = Callable[[Sequence[int]], str]


def token_times(matrix: np.ndarray) -> list[float]:
    """The end of each token, in seconds, of an alignment [num_tokens, num_rows]: larger is closer."""
    tokens, rows = warped(-matrix.astype(np.float64))
    is_first = np.diff(tokens, prepend=-1) > 0
    return [float(row) * SECONDS_PER_TIMESTAMP for row in rows[is_first]]


def warped(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest path through `costs` [n, m], from one corner to the other: (rows, columns) of its steps.

    Equal costs are decided as in Transformers. The values of a diagonal depend on those of the two before it alone, so
    each diagonal is computed at once.
    """
    n, m = costs.shape
    totals = np.full((n + 1, m + 1), np.inf, np.float32)
    totals[0, 0] = 0
    moves = np.full((n + 1, m + 1), 2, np.int8)  # 0: both, 1: row, 2: column
    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        both, row, column = totals[i - 1, j - 1], totals[i - 1, j], totals[i, j - 1]
        move = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        totals[i, j] = costs[i - 1, j - 1] + np.choose(move, (both, row, column))
        moves[i, j] = move
    moves[0, :], moves[:, 0] = 2, 1
    path = []
    i, j = n, m
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        move = moves[i, j]
        i, j = i - (move != 2), j - (move != 1)
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def words_of(clip: ClipText, tokens: SpeechTokens, decode: Decode, *, has_spaces: bool) -> list[Word]:
    """The words of a clip, whose tokens have times. `has_spaces`: spaces divide words in its language."""
    assert clip.times is not None, "the clip was to be aligned"
    words = []
    for _, _, begin, stop in spans_of(clip, tokens):
        places = [at for at in range(begin, stop) if tokens.seconds(clip.token_ids[at]) is None]
        characters = _characters([clip.token_ids[at] for at in places], decode)
        for text, own in _joined(_words(characters) if has_spaces else characters):
            first, last = places[own[0]], places[own[-1]]
            start = clip.times[first - 1] if first else 0.0
            if word := text.strip():
                words.append(Word(word, _seconds(clip, start), _seconds(clip, clip.times[last])))
    return words


def _seconds(clip: ClipText, seconds: float) -> float:
    """A time in the clip as one in the sound."""
    return round(clip.start_seconds + round(seconds, 2), 3)


_Part = tuple[str, list[int]]
"""A text, and the indices of its tokens."""


def _characters(token_ids: list[int], decode: Decode) -> list[_Part]:
    """The shortest runs of tokens that are whole characters."""
    whole = decode(token_ids)
    found: list[_Part] = []
    begin = num_characters = 0
    for stop in range(1, len(token_ids) + 1):
        text = decode(token_ids[begin:stop])
        place = text.find(_UNFINISHED)
        if place < 0 or num_characters + place >= len(whole) or whole[num_characters + place] == _UNFINISHED:
            found.append((text, list(range(begin, stop))))
            num_characters += len(text)
            begin = stop
    return found


def _words(characters: list[_Part]) -> list[_Part]:
    """Joins what no space and no punctuation divides."""
    words: list[_Part] = []
    for text, own in characters:
        if not words or text.startswith(" ") or text.strip() in _PUNCTUATION:
            words.append((text, own))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + own)
    return words


def _joined(words: list[_Part]) -> list[_Part]:
    """Joins punctuation with the words that it belongs to."""
    following = len(words) - 1
    words = list(words)
    for at in range(len(words) - 2, -1, -1):
        text, own = words[at]
        if text.startswith(" ") and text.strip() in _BEFORE:
            words[following] = (text + words[following][0], own + words[following][1])
            words[at] = ("", [])
        else:
            following = at
    before = 0
    for at in range(1, len(words)):
        text, own = words[at]
        if not words[before][0].endswith(" ") and text in _BEHIND:
            words[before] = (words[before][0] + text, words[before][1] + own)
            words[at] = ("", [])
        else:
            before = at
    return [(text, own) for text, own in words if own]
