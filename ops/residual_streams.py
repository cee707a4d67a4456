"""The operations of models with several residual streams (AltUp, arXiv:2301.13310) and sparse gates, as in Gemma 3n.

Streams are [num_streams, num_tokens, size], dense. Sums and means are float32.
"""

from abc import ABC, abstractmethod

from torch import Tensor

MIN_SQUARE = 1e-5
"""The least mean square of a row that is scaled to another magnitude."""


class ResidualStreamOperations(ABC):
    """The operations of residual streams on one kind of device."""

    @abstractmethod
    def match_magnitude(self, x: Tensor, like: Tensor) -> Tensor:
        """Scales each row of `x` [num_tokens, size] to the root mean square of `like`'s; the result is dense, otherwise
        like `x`.
        """

    @abstractmethod
    def expand(self, x: Tensor, projected: Tensor) -> Tensor:
        """Builds streams: `x` [num_tokens, size], then the parts of `projected` [num_tokens, (num_streams - 1) * size].

        Each part is scaled to `x`'s magnitude, as in `match_magnitude`.
        """

    @abstractmethod
    def predict(self, streams: Tensor, coefficients: Tensor) -> Tensor:
        """Returns new streams: stream i plus the sum over j of `coefficients[:, i * num_streams + j]` times stream j.

        `coefficients` [num_tokens, num_streams**2] has the streams' dtype.
        """

    @abstractmethod
    def correct(self, streams: Tensor, activated: Tensor, coefficients: Tensor, active: int) -> Tensor:
        """Returns new streams: stream i plus `1 + coefficients[:, i]` times (`activated` - stream `active`).

        `activated` is [num_tokens, size], `coefficients` [num_tokens, num_streams], both of the streams' dtype.
        """

    @abstractmethod
    def add_to_others(self, streams: Tensor, x: Tensor) -> None:
        """Adds `x` [num_tokens, size] to each stream but the first, in place."""

    @abstractmethod
    def keep_outliers(self, gates: Tensor, whole: Tensor, deviations: float) -> None:
        """Computes `relu(gates - cutoff)` in place, with a row's cutoff `mean + deviations * standard deviation` of
        `whole`.

        `gates` [num_tokens, size] are a part of the columns of `whole` [num_tokens, whole size], or all of them.
        """
