"""Names for the leading blocks of a prompt, by which a router knows prompts that begin alike."""

from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 64
"""Tokens of a router's block. It is coarser than a page: a few tokens more or less change no decision."""


def prompt_blocks(token_ids: Sequence[int], *extras: str | bytes | None, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """A name for each full block of a prompt, which stands for all tokens up to the block's end, in 64 bits.

    Python draws a key for its hashes at its start, so processes agree on names if they are started with the same
    PYTHONHASHSEED. Names need not resist forgery, because they only choose an engine, which has its own.

    Args:
        extras: whatever else must be equal for two prompts to share pages, such as the cache salt; None where there is
            none.
    """
    if len(token_ids) < block_tokens:
        return []
    content = array("q", token_ids).tobytes()
    size = block_tokens * 8
    name = hash(tuple("" if each is None else each for each in extras))  # None has another hash in each process
    names = []
    for end in range(size, len(content) + 1, size):
        name = hash((name, content[end - size : end]))
        names.append(name)
    return names
