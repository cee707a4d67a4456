"""Demands of a checkpoint on the tokens of every output."""

from msgspec import Struct


class TimestampRules(Struct, array_like=True, frozen=True):
    """Rules about the timestamps in a transcript, as Whisper's decoding has them (arXiv:2212.04356).

    Timestamps are the tokens from `first` on. An output begins with one. They come in pairs, except directly before the
    end, and none is earlier than one before it. A timestamp must follow where all of them together are likelier than
    each other token.
    """

    first: int  # id of 0.00 s
    end: int  # ids below this one are text
    not_used: int = -1  # the token that says that there are no timestamps
    latest_first: int | None = None  # id of the latest timestamp that an output may begin with


class OutputRules(Struct, array_like=True, frozen=True):
    """Rules about the first and the last token of an output, and about timestamps between."""

    not_first: list[int] = []  # ids that the first token is none of
    last: list[int] = []  # ids of which the last token of an output of full length is one; empty: any
    length: int = 0  # tokens of an output of full length
    timestamps: TimestampRules | None = None
