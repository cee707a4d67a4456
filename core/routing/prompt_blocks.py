"""Hashes of a prompt's leading blocks, by which a router recognizes prompts that begin alike."""

from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 64
"""Tokens of a router's block. It is coarser than a page: a few tokens more or less change no decision."""


def prompt_blocks(
    token_ids: Sequence[int],
    *extras: str | bytes | None,
    adapter: bytes | None = None,
    adapter_start: int = 0,
    block_tokens: int = BLOCK_TOKENS,
) -> list[int]:
    """A 64-bit name for each full block of a prompt. It represents all tokens up to the block's end.

    Python draws a hash key at its start, so processes agree on names if they have the same PYTHONHASHSEED. Names need
    not resist forgery, because they only choose an engine; the engine's cache has its own hashes.

    Args:
        extras: further values that two prompts must share to share pages, such as the cache salt; None if there is
            none.
        adapter, adapter_start: the digest of what the model has from a token on; None: nothing.
    """
    if len(token_ids) < block_tokens:
        return []
    content = array("q", token_ids).tobytes()
    size = block_tokens * 8
    name = hash(tuple("" if each is None else each for each in extras))  # None has another hash in each process
    names = []
    for end in range(size, len(content) + 1, size):
        name = hash((name, content[end - size : end]))
        if adapter is not None and end - size <= adapter_start * 8 < end:
            name = hash((name, adapter, adapter_start))
        names.append(name)
    return names
