"""Images and sounds of the requests in a worker's slots: the rows that towers made, and the places of tokens."""

import dataclasses

import numpy as np
import torch

from quire.core.wire.media import GIVEN_ROWS, Array, MediaItem, media_end
from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.layers.media_arrays import tensor_of
from quire.executor.models.base import InputEmbeds, MediaRows, Model, ReadsMedia
from quire.executor.step.input_batch import InputBatch
from quire.executor.transfers import to_device


class MediaInputs:
    """Runs towers as plans say, and holds their rows until a plan forgets them.

    Args:
        model: with towers.
        max_num_seqs: slots.
        hidden_size: columns of a row.
        dtype: of the model, which rows that were made elsewhere are converted to.

    Attributes:
        shifts: [max_num_seqs] int64, by slot; what is added to the positions of tokens after a prompt, because images
            take fewer places than tokens.
    """

    def __init__(
        self, model: ReadsMedia, max_num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._items: dict[int, list[MediaItem]] = {}  # by slot, until all tokens with rows are computed
        self._places: dict[int, np.ndarray] = {}  # by slot, [num_axes, num_prompt_tokens]
        self._rows: dict[bytes, MediaRows] = {}  # by digest
        self.shifts = np.zeros(max_num_seqs, np.int64)

    @classmethod
    def of(
        cls, model: Model, max_num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> "MediaInputs | None":
        """Builds those of a worker's model; None if it reads text alone."""
        if not isinstance(model, ReadsMedia) or model.media is None:
            return None
        return cls(model, max_num_seqs, hidden_size, dtype, device)

    def admit(self, request: NewSlot) -> None:
        """Adds the items of a request that enters a slot."""
        self.release([request.slot])
        if not request.media:
            return
        self._items[request.slot] = request.media
        places = self._model.media_positions(request.token_ids[: request.num_prompt_tokens], request.media)
        if places is not None:
            self._places[request.slot] = places.numpy()
            # Outputs follow the last token, as they do in a later prompt that has them in it. The last time of a video
            # may be greater.
            self.shifts[request.slot] = int(places[:, -1].max()) + 1 - request.num_prompt_tokens

    def release(self, slots: list[int]) -> None:
        """Drops the items of these slots, but not the rows."""
        for slot in slots:
            self._items.pop(slot, None)
            if self._places.pop(slot, None) is not None:
                self.shifts[slot] = 0

    def are_pending(self, plan: StepPlan) -> bool:
        """Returns True if a row of `plan` is of a prompt whose tokens with rows are not all computed."""
        return bool(self._items) and any(slot in self._items for slot in plan.slots)

    def encode(self, plan: StepPlan) -> None:
        """Forgets the rows that `plan` drops, and makes those that it wants."""
        for digest in plan.forgotten:
            self._rows.pop(digest, None)
        unread = []
        for item in plan.to_encode:
            given = item.arrays.get(GIVEN_ROWS)
            if given is None:
                unread.append(item)
            else:
                self._rows[item.digest] = self._given(given)
        for item, made in zip(unread, self._model.encode_media(unread) if unread else (), strict=True):
            self._rows[item.digest] = made

    def _given(self, array: Array) -> MediaRows:
        """Rows that a tower has made elsewhere: of the embeddings, and beside them those of the first layers."""
        values = tensor_of(array)
        rows, *deep = values.to(self._device, self._dtype).split(self._hidden_size, dim=1)
        return MediaRows(rows, torch.stack(deep) if deep else None)

    def rows(self, plan: StepPlan) -> InputEmbeds | None:
        """Returns rows of the tokens that `plan` computes, if any."""
        places: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        deep: list[torch.Tensor] = []
        layer_tokens: list[int] = []
        first = 0
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            for item in self._items.get(slot, ()):
                seen = 0  # rows of the item's earlier runs
                for begin, end in item.runs:
                    low, high = max(begin, start), min(end, start + count)
                    if low < high:
                        made = self._rows[item.digest]
                        own = slice(seen + low - begin, seen + high - begin)
                        places.append(torch.arange(first + low - start, first + high - start))
                        parts.append(made.rows[own])
                        if made.deep is not None:
                            deep.append(made.deep[:, own])
                        if made.layer_token is not None:
                            layer_tokens += [made.layer_token] * (high - low)
                    seen += end - begin
            if slot in self._items and start + count >= media_end(self._items[slot]):
                del self._items[slot]
            first += count
        if not parts:
            return None
        at = to_device(torch.cat(places).numpy(), self._device)
        beside = to_device(np.array(layer_tokens), self._device) if layer_tokens else None
        return InputEmbeds(at, torch.cat(parts), torch.cat(deep, dim=1) if deep else None, beside)

    def place(self, plan: StepPlan, batch: InputBatch) -> InputBatch:
        """Returns the batch with the places that its tokens are rotated by."""
        if batch.shape is not None or not any(slot in self._places for slot in plan.slots):
            return batch  # decode steps of a recording have their shifts already
        num_axes = len(next(iter(self._places.values())))
        columns = []
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            places = np.tile(np.arange(start, start + count) + self.shifts[slot], (num_axes, 1))
            if slot in self._places:
                known = self._places[slot][:, start : start + count]
                places[:, : known.shape[1]] = known
            columns.append(places)
        joined = np.concatenate(columns, axis=1)
        if (joined == joined[0]).all():
            return dataclasses.replace(batch, positions=to_device(joined[0], self._device), is_shifted=True)
        return dataclasses.replace(batch, rotary_positions=to_device(joined, self._device), is_shifted=True)
