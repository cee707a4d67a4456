"""The load that clients put on a cluster."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class Load(Struct, frozen=True, kw_only=True):
    """Equal requests without end, at a fixed concurrency or at a rate a second.

    Attributes:
        concurrency: requests at once in the whole cluster; each that ends is followed by another.
        rate: requests that arrive a second; None: `concurrency` says.
    """

    input_len: Positive = 1024
    output_len: Positive = 256
    concurrency: Positive = 256
    rate: Annotated[float, Meta(gt=0)] | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens of a request at its end."""
        return self.input_len + self.output_len
