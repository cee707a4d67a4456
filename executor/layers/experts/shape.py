"""The sizes of a mixture's experts."""

from typing import NamedTuple


class ExpertShape(NamedTuple):
    """Sizes of a layer's experts, before they are split over ranks; `size` is one expert's intermediate size."""

    num_experts: int
    hidden_size: int
    size: int
