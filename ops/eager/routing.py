"""The routing of experts in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.routing import ExpertRouter, Routing, Score


def route(x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
    routing = router.routing
    logits = F.linear(x.float(), router.weight.float(), None if router.bias is None else router.bias.float())
    scores = _SCORES[routing.score](logits)
    choice = scores if router.correction is None else scores + router.correction
    if routing.num_groups > routing.top_groups:
        choice = _within_best_groups(choice, routing)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = _near_shares(logits, ids, routing) if routing.score == "sparse_mixer" else scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=routing.floor)
    weights = weights * routing.scale
    return ids, weights if router.shares is None else weights * router.shares[ids]


_SCORES: dict[Score, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sparse_mixer": lambda logits: logits,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}


def _near_shares(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Computes the weights of the experts `ids` [num_tokens, top_k] as in `Score`."""
    left, weights = logits, []
    for chosen in ids.split(1, dim=1):
        most = left.gather(1, chosen)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > routing.distance
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1)


def _within_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Returns `choice` [num_tokens, num_experts], with -inf for experts outside the best groups."""
    grouped = choice.unflatten(1, (routing.num_groups, -1))
    group_scores = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
    best = group_scores.topk(routing.top_groups, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, value=False)
    return grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)
