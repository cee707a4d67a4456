"""The operations of sampling in plain torch."""

import numpy as np
import torch
from torch import Tensor

from quire.ops.eager import likely_tokens
from quire.ops.eager.token_order import ordered_keys
from quire.ops.host_arrays import to_device
from quire.ops.random import uniforms, uniforms_of
from quire.ops.sampling import MAX_SCORED, RowParameters, SamplingOperations, TokenPlaces, tokens_in

_CHUNK = 512
"""Tokens per chunk. Running sums over the chunks, then within one chunk, replace one over the whole vocabulary."""


class EagerSampling(SamplingOperations):
    def apply_bitmask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        device = logits.device
        octets = to_device(bitmask.view(np.uint8), device)  # little-endian
        bits = octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device) & 1
        forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
        index = to_device(rows, device)
        logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token_ids = logits.argmax(-1)  # argmax finds a NaN before any number, so isfinite sees it
        return token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).isfinite()

    def draw(self, logits: Tensor, starts: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        uniform = to_device(uniforms(starts, positions), logits.device)
        return invert_softmax(logits, uniform)

    def keep_min_p(self, logits: Tensor, log_min_p: np.ndarray) -> Tensor:
        return likely_tokens.keep_min_p(logits, _column(log_min_p, logits))

    def keep_top_k(self, logits: Tensor, top_k: np.ndarray) -> Tensor:
        return likely_tokens.keep_top_k(logits, _column(top_k, logits), int(top_k.max()))

    def keep_top_p(self, logits: Tensor, top_p: np.ndarray) -> Tensor:
        return likely_tokens.keep_top_p(logits, _column(top_p, logits))

    def is_recordable(self, logits: Tensor) -> bool:
        """Returns False: rows without limits would be sorted, too."""
        return False

    def choose(self, logits: Tensor, parameters: RowParameters | None, to: TokenPlaces) -> None:
        token_ids, usable = self.likeliest(logits) if parameters is None else _choose(logits, parameters, to.table)
        to.memory[to.places] = token_ids.int()
        packed = torch.zeros(1, to.ring.shape[1], dtype=torch.uint8, device=logits.device)
        for out, values in zip(tokens_in(packed[0], len(logits)), (token_ids, usable), strict=True):
            out.copy_(values)
        to.ring.index_copy_(0, to.turn, packed)
        if to.scores is not None:
            scores = _scores(logits.float(), token_ids, are_logprobs=to.scores.are_logprobs)
            to.scores.ring[:, : len(logits)].index_copy_(0, to.turn, scores.unsqueeze(0))


def _scores(logits: Tensor, token_ids: Tensor, *, are_logprobs: bool) -> Tensor:
    """A turn of the ring of `ScorePlaces`."""
    values = logits.log_softmax(-1) if are_logprobs else logits
    own = values.gather(1, token_ids.unsqueeze(1))
    shown = ordered_keys(values).topk(MAX_SCORED, dim=-1).indices
    ids = torch.cat((token_ids.unsqueeze(1), shown), 1)
    place = (values > own).sum(-1, keepdim=True) + 1
    return torch.cat((ids.int(), values.gather(1, ids).view(torch.int32), place.int()), 1)


def _choose(logits: Tensor, rows: RowParameters, table: Tensor) -> tuple[Tensor, Tensor]:
    """Chooses tokens from what is on the device, as `choose` does."""
    logits = _penalized(logits.float(), rows, table) / rows.temperature.unsqueeze(1)
    is_greedy = rows.is_greedy != 0
    likeliest = logits.argmax(-1)
    is_finite = logits.gather(1, likeliest.unsqueeze(1)).squeeze(1).isfinite()
    log_min_p, top_k, top_p = (each.unsqueeze(1) for each in (rows.log_min_p, rows.top_k, rows.top_p))
    logits = likely_tokens.keep_min_p(logits, log_min_p)
    logits = likely_tokens.keep_top_k(logits, top_k, logits.shape[1])
    logits = torch.where(top_p < 1, likely_tokens.keep_top_p(logits.clone(), top_p), logits)
    drawn, is_drawn = invert_softmax(logits, uniforms_of(rows.starts, rows.positions))
    return torch.where(is_greedy, likeliest, drawn), torch.where(is_greedy, is_finite, is_drawn)


def _penalized(logits: Tensor, rows: RowParameters, table: Tensor) -> Tensor:
    columns = torch.arange(table.shape[1], device=table.device)
    is_known = (columns >= rows.num_unnamed.unsqueeze(1)) & (columns < rows.positions.unsqueeze(1))
    is_generated = is_known & (columns >= rows.num_prompt_tokens.unsqueeze(1))
    token_ids = torch.where(is_known, table[rows.slots], 0).long()
    counts = torch.zeros_like(logits).scatter_add_(1, token_ids, is_generated.float())
    is_seen = torch.zeros_like(logits).scatter_add_(1, token_ids, is_known.float()) > 0
    repetition, frequency, presence = (each.unsqueeze(1) for each in (rows.repetition, rows.frequency, rows.presence))
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized -= frequency * counts + presence * (counts > 0)
    return torch.where(is_seen, penalized, logits)


def _column(values: np.ndarray, logits: Tensor) -> Tensor:
    return to_device(values, logits.device).unsqueeze(1)


def invert_softmax(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which a row's cumulative softmax first exceeds `uniform` [num_rows], and whether it is one."""
    weights = logits.float().softmax(-1)
    vocab_size = weights.shape[1]
    num_whole = vocab_size // _CHUNK
    sums = weights[:, : num_whole * _CHUNK].unflatten(1, (num_whole, _CHUNK)).sum(-1)
    tail = weights[:, num_whole * _CHUNK :].sum(-1, keepdim=True)
    sums = torch.cat([sums, tail], dim=1).double()
    total = sums.sum(-1)

    chunk, before = _invert(sums, uniform * total)
    index = chunk.unsqueeze(1) * _CHUNK + torch.arange(_CHUNK, device=logits.device)
    inside = weights.gather(1, index.clamp(max=vocab_size - 1)).double().masked_fill_(index >= vocab_size, 0)
    offset, _ = _invert(inside, uniform * total - before)
    token_ids = (chunk * _CHUNK + offset).clamp_(max=vocab_size - 1)
    return token_ids, total.isfinite() & (total > 0)


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The index at which the running sum of a row first exceeds `target`, and the sum before that index.

    Rounding may put the target at or past the total: then the last index with a weight is taken.
    """
    running = weights.cumsum(-1)
    first_above = torch.searchsorted(running, target.unsqueeze(1), right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    place = torch.minimum(first_above, last).clamp_(max=weights.shape[1] - 1)
    return place.squeeze(1), (running - weights).gather(1, place).squeeze(1)
