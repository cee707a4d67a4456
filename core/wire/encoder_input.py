"""The input of a model's encoder: what a request brings of it, and what workers learn of it."""

from msgspec import Struct


class EncoderInput(Struct, array_like=True, frozen=True):
    """What the encoder reads for a request. Its decoder attends to all of it, from the first token on.

    An encoder of another kind of input adds a field here, with the number of rows that the decoder sees.
    """

    token_ids: list[int]

    @property
    def num_rows(self) -> int:
        """Rows of keys and values that the decoder attends to."""
        return len(self.token_ids)


class EncodedInput(Struct, array_like=True, frozen=True):
    """The pages with the keys and values of a request's encoder input.

    `content` is what a worker encodes in the step that admits the request, and writes into these pages. It is None if
    an earlier step has done so, or one for another request of this plan.
    """

    num_rows: int
    page_ids: list[list[int]]  # per KV group of the kind "cross"
    content: EncoderInput | None = None
