"""The input of a model's encoder: what a request brings of it, and what workers learn of it."""

from msgspec import Struct


class Features(Struct, array_like=True, frozen=True):
    """Numbers that an encoder reads in place of tokens: the spectrogram of a sound."""

    values: bytes  # [num_channels, num_frames] float32, little-endian
    num_channels: int
    num_rows: int  # of keys and values that the encoder makes of them
    digest: bytes  # of all that decides about `values`; equal inputs are found by it


class EncoderInput(Struct, array_like=True, frozen=True):
    """What the encoder reads for a request: tokens or features. Its decoder attends to all of it, from the first token
    on.
    """

    token_ids: list[int]
    features: Features | None = None

    @property
    def num_rows(self) -> int:
        """Rows of keys and values that the decoder attends to."""
        return len(self.token_ids) if self.features is None else self.features.num_rows


class EncodedInput(Struct, array_like=True, frozen=True):
    """The pages with the keys and values of a request's encoder input.

    `content` is what a worker encodes in the step that admits the request, and writes into these pages. It is None if
    an earlier step has done so, or one for another request of this plan.
    """

    num_rows: int
    page_ids: list[list[int]]  # per KV group of the kind "cross"
    content: EncoderInput | None = None
