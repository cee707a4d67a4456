"""What engines that share experts send each other in a layer, as ranks decide on it and `quire plan` counts it."""

import functools

CHOICE_BYTES = 12
"""Of one expert that a token chose: its number in 64 bits, and its weight in 32."""
COUNTS_COST = 4 << 20
"""Bytes that may as well be sent as a message which tells how many rows come, where that takes a message of its own."""


@functools.cache
def chosen_share(num_experts: int, num_ranks: int, per_token: int) -> float:
    """The share of tokens that choose an expert of one rank, if all choices are equally likely."""
    per_rank = num_experts / num_ranks
    none = 1.0
    for number in range(per_token):
        none *= max(0.0, 1 - per_rank / (num_experts - number))
    return 1 - none


def saved_bytes(num_tokens: float, num_engines: int, row_bytes: int, share: float) -> float:
    """What an engine does not send if a token goes only to the engines with experts that it chose, and not to all.

    Args:
        row_bytes: of a token, there and back.
        share: see `chosen_share`.
    """
    return (1 - share) * num_tokens * (num_engines - 1) * row_bytes
