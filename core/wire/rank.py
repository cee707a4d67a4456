"""A worker's place among the workers of one model."""

from msgspec import Struct


class Rank(Struct, array_like=True, frozen=True):
    """A worker's coordinates. Workers that differ in one of them divide something among each other.

    Attributes:
        data: whole copies of the model divide the requests.
        pipeline: stages divide the layers.
        tensor: the weights of each layer are divided.
        expert: the experts of each layer are divided.
    """

    data: int = 0
    pipeline: int = 0
    tensor: int = 0
    expert: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this worker reports for all that run the same copy of the model; all of them get the same results."""
        return not (self.pipeline or self.tensor or self.expert)

    def __str__(self) -> str:
        """For logs: the tensor coordinate, and those of the others that are not 0: `tp1`, `dp2-pp1-tp0`."""
        others = (("dp", self.data), ("pp", self.pipeline), ("tp", self.tensor), ("ep", self.expert))
        return "-".join(f"{name}{value}" for name, value in others if value or name == "tp")
