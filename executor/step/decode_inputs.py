"""Builds the inputs of decode steps, always in the same memory, so that a recording can read them again.

A row is a token. A sequence has several in a step that checks drafts; there, a backend says what the rows of a batch
are (`RecordingRules.drafts_as`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.executor.recordings import MAX_DRAFT_ROWS, MAX_RECORDINGS, MAX_ROWS
from quire.executor.sampling.recorded_sampler import RecordedSampler
from quire.executor.step.choice_columns import ChoiceColumns, choice_columns
from quire.executor.step.decode_views import Columns, View, Views
from quire.executor.step.encoded_inputs import CrossRows, EncodedInputs
from quire.executor.step.input_batch import GroupPages, InputBatch, StepShape, UnreadTokens
from quire.executor.step.request_table import RequestTable
from quire.executor.step.step_columns import StepColumn, lay_out
from quire.executor.transfers import Mirror
from quire.ops.backend import DeviceRows
from quire.ops.recording import DraftsAs
from quire.ops.recurrent import StateRows


class DecodeInputs:
    """Builds the batches of steps in which a token is sampled after every row.

    One copy brings a step's columns to the device. All batches share memory, so a batch is valid until the next is
    built. Steps of one shape have their columns in the same places.

    A row of padding has one token, in a page that belongs to nobody, and no state. It has no place among the tokens
    that are sampled.

    Args:
        drafts_as: build steps that check drafts, too, for a model without states and encoder inputs.
        choose_shape: maps the number of rows of a step and the length of its longest sequence to the step's shape.
        has_first_rows: states have first rows (`LayerState`), so a step in which a sequence begins is none of these.
        encoded: the encoder inputs that rows attend to; None: the model has no encoder.
        shifts: [max_num_seqs] int64, by slot, added to the positions of tokens; None: none is.
        sampler: chooses tokens inside of recordings; None: none has it.
    """

    def __init__(
        self,
        table: RequestTable,
        choose_shape: Callable[[int, int], StepShape],
        *,
        has_first_rows: bool = False,
        encoded: EncodedInputs | None = None,
        shifts: np.ndarray | None = None,
        sampler: RecordedSampler | None = None,
        drafts_as: DraftsAs | None = None,
    ) -> None:
        self._table = table
        self._choose_shape = choose_shape
        self._has_first_rows = has_first_rows
        self._encoded = encoded
        self._shifts = shifts
        self._sampler = sampler
        self._drafts_as = drafts_as
        self._max_rows = min(table.max_num_seqs, MAX_ROWS)
        rows = choose_shape(max(self._max_rows, 0 if drafts_as is None else MAX_DRAFT_ROWS), 1).num_rows
        self._rows = np.arange(rows)
        self._ones = np.ones(rows, np.int64)
        self._query_lens = np.ones(rows, np.int64)
        self._seq_lens = np.ones(rows, np.int64)
        self._wanted_positions = np.ones(rows, np.int64)
        self._cross_lens = np.ones(rows, np.int64)
        self._starts = torch.arange(rows + 1)
        self._rows_there = torch.arange(rows, device=table.device)
        self._starts_there = torch.arange(rows + 1, dtype=torch.int32, device=table.device)
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=table.device)
        num_bytes = self._lay_out(StepShape(rows, table.max_seq_len))[-1].next_start
        if sampler is not None:
            num_bytes = choice_columns(sampler, num_bytes, rows)[-1].stop
        self._mirror = Mirror(num_bytes, table.device)
        self._views: dict[tuple[int, StepShape], Views] = {}
        self._memory = table.memory  # that of the views

    def build(self, plan: StepPlan) -> InputBatch | None:
        """Fills the tensors of `plan`, whose changes the table already has; None if the step is no such decode step."""
        num_sequences, num_rows = len(plan.slots), sum(plan.num_wanted)
        if plan.num_scheduled != plan.num_wanted or num_rows > self._most_rows(num_sequences, num_rows):
            return None
        if self._has_first_rows and 0 in plan.num_computed:
            return None
        seq_lens = np.add(plan.num_computed, plan.num_wanted)
        longest = int(seq_lens.max())
        self._reach(longest + 1)
        shape = self._choose_shape(num_rows, longest)
        if num_sequences < num_rows:
            are_rows = self._drafts_as == "rows"
            shape = shape._replace(num_sequences=None if are_rows else num_sequences, are_apart=not are_rows)
        views = self._views.pop((num_rows, shape), None) or self._make_views(num_rows, shape)
        self._views[num_rows, shape] = views  # as the one used last
        batch, slots, positions = views.batch, views.slots, views.positions
        table, size = self._table, self._table.block_size
        sequence_slots, owners = views.slots, self._rows[:num_rows]  # of the batch's rows, and of tokens
        if num_sequences == num_rows:
            slots[:] = plan.slots
            positions[:] = plan.num_computed
        else:
            lens = np.array(plan.num_wanted)
            own = np.repeat(self._rows[:num_sequences], lens)
            slots[:] = np.array(plan.slots)[own]
            positions[:] = self._rows[:num_rows] + (seq_lens - np.cumsum(lens))[own]
            if shape.are_apart:
                sequence_slots, owners = np.array(plan.slots), own
                views.query_lens[:] = lens
        table.places(slots, positions, out=views.places)
        np.add(views.places, 1, out=views.next_places)
        np.add(positions, 1, out=views.wanted_positions)
        np.equal(positions, 0, out=views.is_new)
        views.seq_lens[:] = seq_lens if shape.are_apart else views.wanted_positions
        views.lens[:] = views.wanted_positions
        num_pages = (longest - 1) // size + 1
        page, offset = np.divmod(positions, size)
        for block_tables, pages, slot_mapping in zip(table.block_tables, batch.pages, views.slot_mappings, strict=True):
            pages.block_tables[: len(sequence_slots), :num_pages] = block_tables[sequence_slots, :num_pages]
            np.multiply(pages.block_tables[owners, page], size, out=slot_mapping, dtype=np.int64)
            slot_mapping += offset
        for state_tables in views.state_tables:
            state_tables[:, 0] = slots
        for column in views.adapters:
            found = table.adapters_of(slots, positions)
            if found is not None:
                column[:] = found
                batch = views.adapted
        if self._encoded is not None and views.cross_lens is not None:
            on_host, to_copy = views.cross_lens
            self._encoded.fill(plan.slots, on_host, views.cross_tables)
            to_copy[:] = on_host
        if self._shifts is not None:
            positions += self._shifts[slots]
        for rest, value in views.padding:
            rest[:] = value
        num_bytes = views.num_bytes
        if views.choices is not None and (filled := views.choices.fill(slots, batch.wanted_positions)) is not None:
            chosen, num_bytes = filled
            key = chosen.choice, batch is not views.batch
            if key not in views.choosing:
                views.choosing[key] = dataclasses.replace(batch, chosen=chosen)
            batch = views.choosing[key]
        self._mirror.upload(num_bytes)
        if views.read_ids is not None:
            views.read_ids()
        return batch

    def _most_rows(self, num_sequences: int, num_rows: int) -> int:
        """Returns the most rows of a step like one with so many."""
        if num_sequences == num_rows:
            return self._max_rows
        return 0 if self._drafts_as is None else MAX_DRAFT_ROWS

    def _reach(self, num_columns: int) -> None:
        """Grows the request table. Its memory, which views may refer to, then is another."""
        self._table.reach(num_columns)
        if self._table.memory is not self._memory:
            self._memory = self._table.memory
            self._views.clear()

    def _make_views(self, num_rows: int, shape: StepShape) -> Views:
        columns = self._lay_out(shape)
        memory, is_here = torch.from_numpy(self._mirror.host), self._table.device.type == "cpu"
        host = self._named([column.of(memory).numpy() for column in columns])
        there = self._named([column.of(self._mirror.there) for column in columns])
        batch = self._make_batch(host, there, num_rows, shape)
        choices = None
        if self._sampler is not None and shape.are_apart:
            start = columns[-1].next_start
            choices = ChoiceColumns(
                self._sampler, self._mirror, start, num_rows, shape.num_rows, there.slots, there.next_places
            )
        if len(self._views) >= MAX_ROWS + MAX_RECORDINGS:
            self._views.pop(next(iter(self._views)))
        places, cross_lens = host.places[:num_rows], self._cross_lens[:num_rows]
        return Views(
            batch,
            places,
            host.next_places[:num_rows],
            host.slots[:num_rows],
            host.positions[:num_rows],
            host.is_new[:num_rows],
            batch.query_lens,
            batch.seq_lens[: shape.num_sequences or num_rows],
            batch.wanted_positions,
            host.lens[:num_rows],
            [mapping[:num_rows] for mapping in host.slot_mappings],
            columns[-1].stop,
            self._table.reader(places, batch.token_ids[:num_rows]) if is_here else None,
            self._padding(host, batch.seq_lens, slice(num_rows, shape.num_rows)) if num_rows < shape.num_rows else [],
            [table[:num_rows] for table in host.state_tables],
            [column[:num_rows] for column in host.adapters],
            dataclasses.replace(batch, adapters=there.adapters[0]) if there.adapters else batch,
            (cross_lens, host.cross_lens[0][:num_rows]) if host.cross_lens else None,
            [table[:num_rows] for table in host.cross_tables],
            choices,
            {},
        )

    def _make_batch(
        self, host: Columns[np.ndarray], there: Columns[Tensor], num_rows: int, shape: StepShape
    ) -> InputBatch:
        padded, is_decode = shape.num_rows, shape.num_sequences is None
        seq_lens = self._seq_lens[: shape.num_sequences or padded]
        query_lens = (self._ones if is_decode else self._query_lens)[: len(seq_lens)]
        starts, bound = self._starts_there[: padded + 1], shape.max_seq_len
        pages = [
            GroupPages(
                mapping,
                table[: len(seq_lens)],
                DeviceRows(starts, there.lens, table_there, 1, bound, shape.are_apart) if is_decode else None,
            )
            for mapping, table, table_there in zip(
                there.slot_mappings, host.block_tables, there.block_tables, strict=True
            )
        ]
        rows = None
        if is_decode and shape.are_apart:
            table = host.state_tables[0] if host.state_tables else None
            rows = StateRows(there.slots, self._starts[: padded + 1], there.is_new, table, np.empty(0, np.int64))
        return InputBatch(
            token_ids=self._token_ids[:padded],
            positions=there.positions,
            pages=pages,
            query_lens=query_lens,
            seq_lens=seq_lens,
            num_wanted=query_lens[: shape.num_sequences or num_rows],
            wanted_tokens=self._rows_there[:padded],
            wanted_slots=host.slots[:num_rows],
            wanted_positions=self._wanted_positions[:num_rows],
            rows=rows,
            shape=shape,
            wanted_places=there.next_places[:num_rows],
            cross=self._cross_rows(host.cross_tables, there, starts),
            unread=None if self._table.device.type == "cpu" else UnreadTokens(self._memory, there.places),
        )

    def _padding(self, host: Columns[np.ndarray], seq_lens: np.ndarray, rest: slice) -> list[tuple[np.ndarray, int]]:
        """Returns views of the rows `rest`, and the value that each gets."""
        spare, (to_read, to_write) = self._table.spare_page, self._table.spare_places
        values = [
            *((host.places, to_read), (host.next_places, to_write), (host.slots, -1), (host.positions, 0)),
            *((host.is_new, 1), (host.lens, 1), (seq_lens, 1)),
            *((mapping, spare * self._table.block_size) for mapping in host.slot_mappings),
            *((column, -1) for column in host.adapters),
            *((lens, 1) for lens in ([self._cross_lens, *host.cross_lens] if host.cross_lens else ())),
        ]
        tables = [(table, spare) for table in (*host.block_tables, *host.cross_tables)]
        tables += [(table, 0) for table in host.state_tables]
        return [(column[rest], value) for column, value in values] + [
            (table[rest, 0], value) for table, value in tables
        ]

    def _cross_rows(self, tables: list[np.ndarray], there: Columns[Tensor], starts: Tensor) -> list[CrossRows]:
        """Returns what rows attend to, by group, whose `tables` are on the host."""
        if self._encoded is None:
            return []
        [lens_there] = there.cross_lens
        lens, bound = self._cross_lens[: len(lens_there)], self._encoded.max_rows
        return [
            CrossRows(lens, table, DeviceRows(starts, lens_there, table_there, 1, bound))
            for table, table_there in zip(tables, there.cross_tables, strict=True)
        ]

    def _lay_out(self, shape: StepShape) -> list[StepColumn]:
        """Returns the columns of a shape, in the order of `Columns`."""
        num_groups, rows = len(self._table.block_tables), (shape.num_rows,)
        table = (shape.num_rows, -(-shape.max_seq_len // self._table.block_size))
        kinds: list[tuple[torch.dtype, tuple[int, ...]]] = [
            *4 * [(torch.int64, rows)], (torch.bool, rows), (torch.int32, rows),
            *num_groups * [(torch.int64, rows)], *num_groups * [(torch.int32, table)],
        ]  # fmt: skip
        if self._has_first_rows:
            kinds.append((torch.int32, (shape.num_rows, 1)))
        if self._table.adapters is not None:
            kinds.append((torch.int64, rows))
        if self._encoded is not None:
            table = (shape.num_rows, -(-self._encoded.max_rows // self._table.block_size))
            kinds += [(torch.int32, rows), *self._encoded.num_groups * [(torch.int32, table)]]
        return lay_out(kinds)

    def _named(self, columns: Iterable[View]) -> Columns[View]:
        """Names the columns of `_lay_out`."""
        columns, num_groups = iter(columns), len(self._table.block_tables)
        has_adapters, is_cross = self._table.adapters is not None, self._encoded is not None
        num_cross = 0 if self._encoded is None else self._encoded.num_groups
        counts = (num_groups, num_groups, self._has_first_rows, has_adapters, is_cross, num_cross)
        first = itertools.islice(columns, 6)
        return Columns(*first, *(list(itertools.islice(columns, count)) for count in counts))  # type: ignore[arg-type]
