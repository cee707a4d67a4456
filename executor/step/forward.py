"""The forward pass of a step: from an input batch to hidden states, to logits, or to a message for the next stage."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.executor.layers.adapters import Adapters
from quire.executor.models.base import (
    EncoderDecoder,
    InputEmbeds,
    LayerCache,
    LayerTaps,
    Model,
    ReadsMedia,
    ShardView,
    StepContext,
    Wanted,
)
from quire.executor.parallel.context.strategy import WHOLE, ContextParallel
from quire.executor.step.encoded_inputs import EncoderBatch
from quire.executor.step.input_batch import GroupPages, InputBatch
from quire.executor.step.span_rows import SpanRows
from quire.executor.step.stage import PipelineStage
from quire.executor.transfers import to_device
from quire.ops.backend import AttentionBatch, Backend


class Forward:
    """A model, its layers' caches in pages of `block_size` slots, and the states of its recurrent layers.

    Args:
        stage: the rank's place in the pipeline. `hand_over` is for stages before the last, other methods for the last.
        sequences: the division of positions over ranks.
        adapters: the place where the model's layers meet those of a step's tokens; None: it has no adapters.
        has_peers: other engines take part in each layer with experts, and expect all of a step's tokens there.
    """

    def __init__(
        self,
        model: Model,
        ops: Backend,
        caches: Sequence[LayerCache],
        block_size: int,
        states: Sequence[Sequence[torch.Tensor]] = (),
        stage: PipelineStage | None = None,
        sequences: ContextParallel = WHOLE,
        *,
        adapters: Adapters | None = None,
        has_peers: bool = False,
    ) -> None:
        self._model = model
        self._ops = ops
        self._caches = caches
        self._block_size = block_size
        self._states = states
        self._stage = stage or PipelineStage()
        self._sequences = sequences
        self._adapters = adapters
        self._has_peers = has_peers
        self._without_spans = {
            cache.group
            for cache, layer in zip(caches, model.kv_layers, strict=True)
            if layer.window is None and isinstance(model, ReadsMedia) and model.media and model.media.in_windows
        }

    @property
    def sees_prompts(self) -> bool:
        """True if tokens of a prompt see later ones, so that a step has all of a prompt."""
        return any(layer.sees_prompt for layer in self._model.kv_layers)

    @property
    def forgets_tokens(self) -> bool:
        """True if layers give up the pages of tokens that no later one sees."""
        return any(layer.window is not None for layer in self._model.kv_layers)

    def encode(self, batch: EncoderBatch) -> None:
        """Encodes inputs, and stores the keys and values that the decoder's layers attend to."""
        assert isinstance(self._model, EncoderDecoder), (
            "a request brings an encoder input to a model without an encoder"
        )
        groups = sorted(
            {cache.group for cache, kv in zip(self._caches, self._model.kv_layers, strict=True) if kv.is_cross}
        )
        step = StepContext(
            batch.positions,
            self._caches,
            [],
            sequences=self._ops.sequence_batch(batch.lengths, batch.positions.device),
            encoder_slots=dict(zip(groups, batch.slot_mappings, strict=True)),
        )
        self._model.encode(batch.content, step)

    def hidden(
        self, batch: InputBatch, input_embeds: InputEmbeds | None = None, taps: LayerTaps | None = None
    ) -> torch.Tensor:
        """Returns hidden states of all tokens, [num_tokens, hidden], and collects the outputs of layers in `taps`."""
        step = self._whole_step(batch, input_embeds)
        step.taps = taps
        return self._model.forward(batch.read_token_ids(), step)

    def hand_over(self, batch: InputBatch, input_embeds: InputEmbeds | None = None) -> None:
        """Sends the next stage its input for all tokens."""
        self._stage.send(self._model.forward(batch.read_token_ids(), self._whole_step(batch, input_embeds)))

    def logits(self, batch: InputBatch, input_embeds: InputEmbeds | None = None) -> torch.Tensor:
        """Returns logits of the wanted tokens, [num_wanted, vocab_size]. In the last layer, others get only keys and
        values.
        """
        wanted = None
        if len(batch.wanted_tokens) < len(batch.token_ids) and not self._has_peers:
            wanted = self._wanted(batch)
        hidden = self._model.forward(batch.read_token_ids(), self._whole_step(batch, input_embeds, wanted))
        if not len(batch.wanted_tokens):
            return hidden[:0]  # no logits are read
        if len(hidden) > len(batch.wanted_tokens):  # for example if another stage has the last layer that mixes tokens
            return self.wanted_logits(hidden, batch)
        return self._model.compute_logits(hidden)

    def draft(self, batch: InputBatch, states: torch.Tensor) -> torch.Tensor:
        """Runs layers that draft (`DraftHeads`) on `states` [num_tokens, size] of their target.

        Returns hidden states of the wanted tokens, [num_wanted, hidden].
        """
        step = self._whole_step(batch, None, self._wanted(batch))
        step.target_states = states
        hidden = self._model.forward(batch.read_token_ids(), step)
        if not len(batch.wanted_tokens):
            return hidden[:0]
        return hidden if len(hidden) == len(batch.wanted_tokens) else self._ops.take_rows(hidden, batch.wanted_tokens)

    def wanted_logits(self, hidden: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Computes `logits` from the hidden states of all tokens."""
        return self._model.compute_logits(self._ops.take_rows(hidden, batch.wanted_tokens))

    def compute_logits(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """Computes logits of consecutive tokens of the last step, from the index `first` on."""
        if self._adapters is not None:
            self._adapters.enter_part(first, len(hidden))
        return self._model.compute_logits(hidden)

    def variant(self, batch: InputBatch) -> int:
        """Returns a number that is the same for batches whose steps run the same operations, if their shape is."""
        return 0 if self._adapters is None or batch.adapters is None else self._adapters.version

    def _whole_step(
        self, batch: InputBatch, input_embeds: InputEmbeds | None, wanted: Wanted | None = None
    ) -> StepContext:
        return self._step(batch, *self._attention(batch, batch.query_lens), input_embeds, wanted)

    def _step(
        self,
        batch: InputBatch,
        attention: Sequence[AttentionBatch],
        shard_view: ShardView | None,
        input_embeds: InputEmbeds | None,
        wanted: Wanted | None,
    ) -> StepContext:
        if self._adapters is not None:
            tokens = batch.wanted_tokens if wanted is None else wanted.tokens
            self._adapters.enter_step(batch.adapters, tokens if len(tokens) < len(batch.token_ids) else None)
        return StepContext(
            batch.positions,
            self._caches,
            attention,
            shard_view=shard_view,
            input_embeds=input_embeds,
            wanted=wanted,
            states=self._states,
            rows=batch.rows,
            received=self._stage.receive(len(batch.token_ids)),
            hands_over=not self._stage.is_last,
            sequences=self._ops.sequence_batch(batch.query_lens, batch.token_ids.device) if batch.is_uncached else None,
            token_types=batch.token_types,
            rotary_positions=batch.rotary_positions,
        )

    def _wanted(self, batch: InputBatch) -> Wanted:
        """Returns the wanted tokens of a step, or its last token if none is wanted, because a layer must have an
        output.
        """
        num_wanted, tokens = batch.num_wanted, batch.wanted_tokens
        if not len(tokens):
            num_wanted = np.zeros_like(num_wanted)
            num_wanted[-1] = 1
            tokens = to_device(np.array([len(batch.token_ids) - 1]), batch.token_ids.device)
        return Wanted(tokens, *self._attention(batch, num_wanted))

    def _attention(self, batch: InputBatch, query_lens: np.ndarray) -> tuple[list[AttentionBatch], ShardView | None]:
        """Builds, by KV group, the attention of the last `query_lens` tokens of each row that has any; stores all
        tokens.
        """
        spans = batch.prefix_spans
        if self._sequences.is_divided:
            assert spans is None, "ranks that divide positions compute no prefix spans"
            return self._sequences.attention(self._ops, batch, query_lens, self._block_size)
        if spans is not None:
            return self._attention_of(SpanRows.of(query_lens, batch.seq_lens, spans), batch.pages), None
        own: np.ndarray | slice = slice(None) if query_lens.all() else np.flatnonzero(query_lens)
        attention = [
            self._ops.attention_batch(
                query_lens[own],
                batch.seq_lens[own],
                pages.block_tables[own],
                pages.slot_mapping,
                block_size=self._block_size,
                there=pages.there if query_lens is batch.query_lens else None,
            )
            for pages in batch.pages
        ]
        slots = batch.pages[0].slot_mapping if batch.cross else None
        for rows in batch.cross:
            assert slots is not None
            seen = rows if query_lens is batch.query_lens else rows._replace(there=None)
            attention.append(seen.attention(self._ops, query_lens, own, slots, self._block_size))
        return attention, None

    def _attention_of(self, rows: SpanRows, groups: Sequence[GroupPages]) -> list[AttentionBatch]:
        return [
            self._ops.attention_batch(
                rows.query_lens,
                rows.seq_lens,
                pages.block_tables[rows.sequences],
                pages.slot_mapping,
                block_size=self._block_size,
                prefix_spans=None if group in self._without_spans else rows.spans,
            )
            for group, pages in enumerate(groups)
        ]
