"""The forward pass of a rank that computes a part of a step's tokens: those at the positions whose keys it holds.

Ranks that compute the same tokens (`DividedContext.num_same`) also compute those of one another.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.executor.layers.adapters import Adapters
from quire.executor.models.base import InputEmbeds, LayerCache, LayerTaps, Model, ShardView, Wanted
from quire.executor.parallel.context.divided import DividedContext
from quire.executor.parallel.context.rounds import RingRounds, SharedTokens
from quire.executor.parallel.context.rows import PartialRows, last_tokens
from quire.executor.parallel.token_shares import TokenShares
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import GroupPages, InputBatch
from quire.executor.step.stage import PipelineStage
from quire.executor.transfers import to_device
from quire.ops.backend import AttentionBatch, Backend


class _Division(NamedTuple):
    """The division of a step's tokens; all [num_tokens] int64 except the shares.

    Attributes:
        sequences: the row of each token.
        positions: of each token in its sequence.
        owners: the rank that holds each token's keys.
        shares: of all tokens, by part.
    """

    sequences: np.ndarray
    positions: np.ndarray
    owners: np.ndarray
    shares: TokenShares


class DividedForward(Forward):
    """A `Forward` over a division of tokens. Its arguments and results are for all tokens, and the same on all ranks.

    Blocks of queries have one size on all ranks, so all compute equally many tokens. A rank with fewer pads with
    another rank's token, whose keys it does not store.

    Args:
        sequences: the division of tokens and positions over ranks.
    """

    def __init__(
        self,
        model: Model,
        ops: Backend,
        caches: Sequence[LayerCache],
        block_size: int,
        stage: PipelineStage,
        sequences: DividedContext,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(model, ops, caches, block_size, stage=stage, adapters=adapters)
        self._group = sequences.group
        self._part = sequences.shard
        self._num_parts, self._num_same = sequences.num_parts, sequences.num_same
        windows = {cache.group: layer.window for layer, cache in zip(model.kv_layers, caches, strict=True)}
        self._windows = [windows.get(group) for group in range(max(windows, default=-1) + 1)]

    def hidden(
        self, batch: InputBatch, input_embeds: InputEmbeds | None = None, taps: LayerTaps | None = None
    ) -> torch.Tensor:
        assert taps is None, "speculators that read layers are refused where tokens are divided"
        division = self._divide(batch)
        hidden = self._join(self._run(batch, division, input_embeds), division.shares)
        if self._adapters is not None:
            self._adapters.enter_step(batch.adapters, batch.wanted_tokens)  # the head sees all ranks' tokens
        return hidden

    def hand_over(self, batch: InputBatch, input_embeds: InputEmbeds | None = None) -> None:
        """Sends the next stage the input of the same rank there."""
        self._stage.send(self._run(batch, self._divide(batch), input_embeds))

    def logits(self, batch: InputBatch, input_embeds: InputEmbeds | None = None) -> torch.Tensor:
        division = self._divide(batch)
        wanted = self._share_wanted(batch, division)
        hidden = self._run(batch, division, input_embeds, wanted)
        if self._adapters is not None:
            self._adapters.enter_step(batch.adapters, batch.wanted_tokens)  # the head sees all ranks' tokens
        if not len(batch.wanted_tokens):
            return hidden[:0]  # no logits are read
        if wanted is None or len(hidden) > wanted.size:
            return self.wanted_logits(self._join(hidden, division.shares), batch)
        return self._model.compute_logits(self._join(hidden, wanted))

    def _divide(self, batch: InputBatch) -> _Division:
        sequences, positions = last_tokens(batch.query_lens, batch.seq_lens)
        owners = self._part.owner(positions)
        # A rank that needs padding takes the first token that is not its own.
        others = np.argmax(owners // self._num_same != np.arange(self._num_parts)[:, None], axis=1)
        shares = TokenShares.of(np.arange(len(owners)), owners, others, self._num_same)
        return _Division(sequences, positions, owners, shares)

    def _share_wanted(self, batch: InputBatch, division: _Division) -> TokenShares | None:
        """Returns the wanted tokens, or the last if there are none; None if a rank computes no others."""
        num_wanted = batch.num_wanted
        wanted = np.arange(num_wanted.sum()) + np.repeat(np.cumsum(batch.query_lens - num_wanted), num_wanted)
        if not len(wanted):
            wanted = np.array([len(division.owners) - 1])
        owners = division.owners[wanted]
        shares = TokenShares.of(wanted, owners, division.shares.tokens[:, 0], self._num_same)
        return None if shares.size == division.shares.size else shares

    def _run(
        self,
        batch: InputBatch,
        division: _Division,
        input_embeds: InputEmbeds | None,
        shared: TokenShares | None = None,
    ) -> torch.Tensor:
        """Runs the model on this rank's tokens, or on the wanted ones among them."""
        device, number = batch.token_ids.device, self._part.rank // self._num_same
        own = division.shares.tokens[number]
        index = to_device(own, device)
        part = dataclasses.replace(
            batch,
            token_ids=batch.token_ids[index],
            positions=batch.positions[index],
            pages=[GroupPages(pages.slot_mapping[index], pages.block_tables) for pages in batch.pages],
            adapters=None if batch.adapters is None else batch.adapters[index],
        )
        places = np.full(len(division.owners), -1)
        places[own[::-1]] = np.arange(len(own))[::-1]
        if input_embeds is not None:
            input_embeds = _own_rows(input_embeds, to_device(places, device))
        wanted = None
        if shared is not None:
            wanted = Wanted(to_device(places[shared.tokens[number]], device), *self._attend(part, division, shared))
        attention, shard_view = self._attend(part, division, division.shares)
        return self._model.forward(part.token_ids, self._step(part, attention, shard_view, input_embeds, wanted))

    def _attend(
        self, batch: InputBatch, division: _Division, shares: TokenShares
    ) -> tuple[list[AttentionBatch], ShardView]:
        """Builds, by KV group, the attention of all ranks' tokens to this rank's keys."""
        tokens = SharedTokens(division.sequences[shares.tokens], division.positions[shares.tokens])
        rows = PartialRows.of(self._part, tokens.sequences.ravel(), tokens.positions.ravel(), batch.token_ids.device)
        rounds = RingRounds(self._ops, batch, tokens, self._part, self._num_same, self._windows, self._block_size)
        return rows.attention(self._ops, batch.pages, self._block_size), rows.shard_view._replace(rounds=rounds)

    def _join(self, hidden: torch.Tensor, shares: TokenShares) -> torch.Tensor:
        """Joins the hidden states of all divided tokens, in their order."""
        parts, columns = np.divmod(shares.places, shares.size)  # for each part, one of the ranks with the same tokens
        places = parts * self._num_same * shares.size + columns
        return self._ops.take_rows(self._group.all_gather(hidden, dim=0), to_device(places, hidden.device))


def _own_rows(input_embeds: InputEmbeds, places: torch.Tensor) -> InputEmbeds | None:
    """Returns the rows of this rank's tokens, by `places` [num_tokens] int64, which is -1 for other tokens."""
    here = places[input_embeds.places]
    index = (here >= 0).nonzero().squeeze(1)
    return InputEmbeds(here[index], input_embeds.rows[index]) if len(index) else None
