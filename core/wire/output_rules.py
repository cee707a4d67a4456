"""Tokens at the two ends of an output, as a checkpoint's generation_config.json demands them."""

from msgspec import Struct


class OutputRules(Struct, array_like=True, frozen=True):
    """Rules about the first and the last token of an output."""

    not_first: list[int] = []  # ids that the first token is none of
    last: list[int] = []  # ids of which the last token of an output of full length is one; empty: any
    length: int = 0  # tokens of an output of full length
