"""Speculative tokens (drafts): proposed before the model has computed them, and accepted by comparison.

A draft is accepted if it equals the token that is sampled at its position. Sampling is a function of the request's seed
and the position, so a request's tokens are the same with and without drafts. Keys and values of rejected drafts lie
past the known tokens, where nothing reads them, until the right tokens overwrite them.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.executor.sampling.sampler import Sampled
from quire.executor.step.input_batch import InputBatch
from quire.executor.transfers import to_device


class Proposal(NamedTuple):
    """Drafts for some rows, on the device.

    Attributes:
        token_ids: [num_rows, most drafts] int64; valid ids, arbitrary past a row's own drafts.
        num_drafts: [num_rows] int64.
    """

    token_ids: Tensor
    num_drafts: Tensor

    @classmethod
    def none(cls, device: torch.device) -> "Proposal":
        """Returns what is proposed for no rows."""
        return cls(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((0, 0), (0,))))


def num_accepted(sampled: Sampled, batch: InputBatch, num_wanted: np.ndarray, *, on_host: bool = False) -> Tensor:
    """Counts the new tokens of each row that wants any, [num_rows] int64 on the device; at least 1.

    The first token may be unusable. Other tokens do not count after a wrong draft, or if they are unusable.

    Args:
        num_wanted: [num_rows] int64, as in the step's plan.
        on_host: the host computes the step, so that nothing waits for its tokens.
    """
    counts = num_wanted[num_wanted > 0]
    if on_host:
        return torch.from_numpy(_num_accepted_on_host(sampled, batch, counts.tolist()))
    columns = np.arange(counts.max())
    inside = columns < counts[:, None]
    index = to_device(np.where(inside, (np.cumsum(counts) - counts)[:, None] + columns, 0), batch.token_ids.device)
    # The token after a wanted one is the draft to confirm; after the last one of a row there is none.
    followers = (batch.wanted_tokens[: len(sampled.token_ids)] + 1).clamp_(max=len(batch.token_ids) - 1)
    usable = sampled.usable[index] & to_device(inside, batch.token_ids.device)
    is_confirmed = (sampled.token_ids == batch.token_ids[followers])[index] & usable
    is_reached = torch.cat([torch.ones_like(usable[:, :1]), is_confirmed[:, :-1]], 1).cumprod(1).bool()
    return (is_reached & usable).sum(1).clamp_(min=1)


def _num_accepted_on_host(sampled: Sampled, batch: InputBatch, counts: list[int]) -> np.ndarray:
    """Counts the same without torch, which takes ten times as long for a few rows.

    `counts` are the wanted tokens of each row.
    """
    token_ids, usable = sampled.on_host
    known = batch.token_ids.numpy()
    followers = known[np.minimum(batch.wanted_tokens[: len(token_ids)].numpy() + 1, len(known) - 1)].tolist()
    accepted, first = [], 0
    for count in counts:
        end, place = first + count, first
        while place < end and usable[place]:
            place += 1
            if token_ids[place - 1] != followers[place - 1]:
                break
        accepted.append(max(1, place - first))
        first = end
    return np.array(accepted, np.int64)
