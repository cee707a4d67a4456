"""The inputs of a step: applies a plan to the slots, and builds the tensors of its rows."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from quire.core.wire.protocol import StepPlan
from quire.executor.models.base import InputEmbeds
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.encoded_inputs import EncodedInputs, EncoderBatch
from quire.executor.step.input_batch import InputBatch, build_input_batch
from quire.executor.step.media_inputs import MediaInputs
from quire.executor.step.page_moves import PageMoves
from quire.executor.step.request_table import RequestTable
from quire.executor.step.slot_state import SlotState
from quire.executor.step.token_types import TokenTypes
from quire.executor.transfers import to_device


class Inputs(NamedTuple):
    """The rows of one step.

    Attributes:
        input_embeds: rows that replace embeddings.
        can_be_recorded: the tensors are in the same memory in each step of the batch's shape.
        to_encode: what the encoder reads before the rows are computed.
    """

    batch: InputBatch
    input_embeds: InputEmbeds | None
    can_be_recorded: bool
    to_encode: EncoderBatch | None = None


class StepInputs:
    """Owns the request table of one rank.

    Args:
        slot_states: all objects that keep state of the requests in the slots, `table`, `embedded` and `token_types`
            included.
        moves: of pages between the rank's tiers of memory.
        decode_inputs: None where a rank computes or keeps a part of each sequence, whose inputs have no fixed place.
        has_states: the rank has recurrent layers.
        encoded: of a model with an encoder; one of `slot_states`.
        media: of a model with towers; one of `slot_states`.
    """

    def __init__(
        self,
        table: RequestTable,
        embedded: EmbeddedPrompts,
        token_types: TokenTypes,
        slot_states: Sequence[SlotState],
        moves: PageMoves,
        decode_inputs: DecodeInputs | None = None,
        *,
        has_states: bool = False,
        encoded: EncodedInputs | None = None,
        media: MediaInputs | None = None,
    ) -> None:
        self.table = table
        self._embedded = embedded
        self._token_types = token_types
        self._slot_states = slot_states
        self._moves = moves
        self._decode_inputs = decode_inputs
        self._has_states = has_states
        self._encoded = encoded
        self._media = media

    def build(self, plan: StepPlan) -> Inputs | None:
        """Applies the changes of `plan` to the slots; returns its rows, or None if it has none."""
        self._apply(plan)
        if self._media is not None:
            self._media.encode(plan)
        if not plan.slots:
            return None
        has_rows = self._media is not None and self._media.are_pending(plan)
        decode = None if self._decode_inputs is None or has_rows else self._decode_inputs.build(plan)
        input_embeds = self._embedded.rows(plan) if self._embedded.pending else None
        batch = decode or self._build(plan)
        if self._media is not None:
            input_embeds = _joined(input_embeds, self._media.rows(plan) if has_rows else None)
            batch = self._media.place(plan, batch)
        if self._token_types.pending:
            batch = dataclasses.replace(batch, token_types=self._token_types.rows(plan))
        to_encode = None if self._encoded is None else self._encoded.take_batch()
        return Inputs(batch, input_embeds, decode is not None and input_embeds is None, to_encode)

    def _build(self, plan: StepPlan) -> InputBatch:
        """Builds the rows of any plan."""
        batch = build_input_batch(plan, self.table, has_states=self._has_states)
        if self._encoded is None:
            return batch
        return dataclasses.replace(batch, cross=self._encoded.rows(np.asarray(plan.slots, np.int64)))

    def finish(self, plan: StepPlan) -> list[int]:
        """Makes the moves of pages that come after the step's launch. Returns the ids of all moves that are done."""
        self._moves.after(plan)
        return self._moves.drain()

    def _apply(self, plan: StepPlan) -> None:
        """Applies the changes of `plan` in this order: moves of pages, releases, admissions, new pages and tokens."""
        self._moves.before(plan)
        if plan.released or plan.admitted:
            for state in self._slot_states:
                state.release(plan.released)
                for request in plan.admitted:
                    state.admit(request)
        for slot, page_ids in plan.appended_pages:
            self.table.append_pages(slot, page_ids)
        if plan.sampled:
            rows, tokens = zip(*plan.sampled, strict=True)
            lens = [len(each) for each in tokens]
            slots = np.repeat([plan.slots[row] for row in rows], lens)
            positions = np.concatenate(
                [plan.num_computed[row] + np.arange(n) for row, n in zip(rows, lens, strict=True)]
            )
            token_ids = to_device(np.concatenate(tokens), self.table.device)
            self.table.write(slots, positions, token_ids)


def _joined(own: InputEmbeds | None, others: InputEmbeds | None) -> InputEmbeds | None:
    """Returns the rows of prompts that are embeddings, and those of images in other prompts."""
    if own is None or others is None:
        return others if own is None else own
    deep, layer_tokens = others.deep, others.layer_tokens
    if deep is not None:
        deep = pad(deep, (0, 0, len(own.rows), 0))
    if layer_tokens is not None:
        layer_tokens = pad(layer_tokens, (len(own.rows), 0), value=-1)
    return InputEmbeds(
        torch.cat((own.places, others.places)), torch.cat((own.rows, others.rows)), deep, layer_tokens
    )  # fmt: skip
