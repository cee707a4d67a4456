"""The parameters of a router, as `Backend.route` takes them."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Score = Literal["softmax", "sigmoid", "sparse_mixer", "sqrt_softplus"]
"""What a router makes of its logits: shares of all experts, each expert's own probability, shares of near experts
(SparseMixer, arXiv:2409.12136, at inference), or the square root of `log(1 + exp(logit))`.

Those near the best expert not chosen yet, with the logit m, are the ones not chosen yet whose logit l is within
(m - l) / max(|l|, m) <= `Routing.distance`. The weight of that expert is its share of a softmax of these alone.
"""

SCORES: tuple[Score, ...] = get_args(Score)


class Routing(NamedTuple):
    """The selection and the weights of a token's experts.

    The `top_k` experts with the highest scores are selected; with groups, only experts of the `top_groups` best groups
    (arXiv:2405.04434). A group's score is the sum of its `group_best` best experts'.

    Attributes:
        score: of a logit; the weight of a selected expert is its score.
        renormalize: weights are divided by their sum, which counts as at least `floor`. With `softmax` this is the
            softmax of the selected experts' logits.
        scale: multiplies all weights in the end.
        distance: see `Score`.
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    floor: float = 1e-20
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    distance: float = 0.0


class ExpertRouter(NamedTuple):
    """A linear layer, one output an expert, and the parameters of its outputs' use.

    Attributes:
        weight: [num_experts, hidden].
        bias: [num_experts] of the layer, or None.
        correction: [num_experts] float32; added to the scores for the selection of experts, but not to their weights
            (arXiv:2408.15664).
        shares: [num_experts] float32; the weight of an expert is multiplied by its own in the end.
    """

    routing: Routing
    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None
    shares: Tensor | None = None
