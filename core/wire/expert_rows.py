"""The traffic between engines that share experts, in one layer. Ranks decide by it, and `quire plan` counts it."""

import functools

CHOICE_BYTES = 12
"""Bytes of one chosen expert of a token: its id in 64 bits, and its weight in 32."""
COUNTS_COST = 4 << 20
"""The cost of a separate message with the number of rows, as an equivalent number of bytes."""


@functools.cache
def chosen_share(num_experts: int, num_ranks: int, per_token: int) -> float:
    """The share of tokens that choose an expert of one rank, if all choices are equally likely."""
    per_rank = num_experts / num_ranks
    none = 1.0
    for number in range(per_token):
        none *= max(0.0, 1 - per_rank / (num_experts - number))
    return 1 - none


def saved_bytes(num_tokens: float, num_engines: int, row_bytes: int, share: float) -> float:
    """The bytes that an engine saves if a token goes only to the engines with its chosen experts, and not to all.

    Args:
        row_bytes: of a token, there and back.
        share: see `chosen_share`.
    """
    return (1 - share) * num_tokens * (num_engines - 1) * row_bytes
