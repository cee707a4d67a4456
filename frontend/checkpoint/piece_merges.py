"""Merges of byte-pair encoding for vocabularies that have scores in their place, as SentencePiece's do."""

from collections.abc import Container, Iterable


def merges_by_score(scores: Iterable[tuple[str, float]], parts: Container[str]) -> list[tuple[str, str]]:
    """The pairs of `parts` that make each of the scored pieces, in the order in which SentencePiece merges them.

    SentencePiece merges the pair that makes the piece of the best score, and of equal pieces the leftmost. A list of
    merges ranks pairs, not places. Longer left halves come first, which is leftmost in runs of one character: those
    are merged from the left, so what is left over in the end is short.
    """
    best_first = sorted(scores, key=lambda item: -item[1])  # stable: equal scores keep their order
    return [
        (piece[:cut], piece[cut:])
        for piece, _ in best_first
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in parts and piece[cut:] in parts
    ]
