"""Builds the runner of a rank's steps for its place in the layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from quire.core.config.resolved import EngineConfig
from quire.core.trace import Spans
from quire.core.wire.page_moves import Tier
from quire.core.wire.row_outputs import OutputKind
from quire.executor.layers.adapters import Adapters
from quire.executor.layers.attention.layer_kv import LatentKV
from quire.executor.models.base import AlignsTokens, LayerCache, Model
from quire.executor.models.vector_heads import VectorHead
from quire.executor.parallel.context.divided import DividedContext
from quire.executor.parallel.context.strategy import ContextParallel
from quire.executor.recordings import largest_step, rules_for
from quire.executor.sampling.custom import CustomFeature
from quire.executor.sampling.recorded_sampler import RecordedSampler
from quire.executor.sampling.sampler import Sampler
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.divided_forward import DividedForward
from quire.executor.step.drafting.drafter import Drafter
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.encoded_inputs import EncodedInputs
from quire.executor.step.forward import Forward
from quire.executor.step.heads.aligner import Aligner, CrossLayerCache
from quire.executor.step.heads.head import Head
from quire.executor.step.heads.pooler import Pooler, TokenVectors
from quire.executor.step.heads.prompt_scorer import PromptScorer
from quire.executor.step.media_inputs import MediaInputs
from quire.executor.step.model_runner import ModelRunner
from quire.executor.step.page_moves import PageMoves
from quire.executor.step.page_tiers import CachePages, PageTier, SlotStates
from quire.executor.step.recorded_sequences import RecordedSequences
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.row_sampler import RowSampler
from quire.executor.step.short_memory import StepInParts
from quire.executor.step.slot_state import SlotState
from quire.executor.step.speculator import ForwardReads
from quire.executor.step.stage import PipelineStage
from quire.executor.step.stage_runner import StageRunner
from quire.executor.step.state_rewind import StateRewind
from quire.executor.step.step_inputs import StepInputs
from quire.executor.step.token_types import TokenTypes
from quire.executor.transfers import Transfers
from quire.ops.backend import Backend
from quire.ops.recording import DraftsAs


class RequestMemory(NamedTuple):
    """The memory of a rank's requests from step to step.

    Attributes:
        pages: the tensors of the KV cache, each [num_pages, bytes] of uint8.
        caches: the layers' places in them.
        states: by recurrent layer, tensors [max_num_seqs, ...].
        tiers: other tiers of memory that have pages.
        encoded: the encoder inputs of a model that has an encoder.
    """

    table: RequestTable
    pages: Sequence[torch.Tensor]
    caches: Sequence[LayerCache]
    states: Sequence[Sequence[torch.Tensor]]
    tiers: Mapping[Tier, PageTier] = {}
    encoded: EncodedInputs | None = None


def build_runner(
    config: EngineConfig,
    model: Model,
    memory: RequestMemory,
    ops: Backend,
    transfers: Transfers,
    spans: Spans,
    *,
    stage: PipelineStage,
    sequences: ContextParallel,
    adapters: Adapters | None,
    has_peers: bool,
    custom: Sequence[CustomFeature],
    drafter: Callable[[Sampler], Drafter | None],
    vector_heads: Mapping[str, VectorHead],
    is_profiled: Callable[[], bool],
) -> ModelRunner | StageRunner:
    """Builds the runner of one rank: the last pipeline stage samples, others send to the next.

    Args:
        sequences: the division of sequences' positions over ranks, as in `memory`.
        adapters: those of the model's linear layers, if any.
        has_peers: other engines run every step together with this one.
        custom: features of logits processors, in the stage that samples.
        drafter: builds what proposes drafts, in the stage that samples; None: nothing does.
        vector_heads: those that requests for vectors may name.
        is_profiled: called at each step, see `RecordedSteps`.
    """
    spec, table = config.spec, memory.table
    forward = _choose_forward(config, model, memory, ops, stage, sequences, adapters, has_peers=has_peers)
    # Communication between ranks cannot be recorded.
    can_record = stage.is_last and config.layout.num_workers == 1 and not has_peers and not config.enforce_eager
    sampler = _sampler(config, ops, custom, transfers)
    recorded_sampler = _recorded_sampler(config, sampler, ops, table) if can_record else None
    recorded = RecordedSteps(
        forward,
        ops,
        table.max_seq_len,
        graphs=config.graphs,
        enabled=can_record,
        is_paused=is_profiled,
        sampler=recorded_sampler,
    )
    dtype = getattr(torch, spec.dtype)
    embedded = EmbeddedPrompts(spec.hidden_size, dtype, table.device)
    token_types = TokenTypes(table.device)
    media = MediaInputs.of(model, config.limits.max_num_seqs, spec.hidden_size, dtype, table.device)
    is_cached = bool(table.block_tables or memory.states)
    decode_inputs = None
    if not sequences.is_divided and is_cached:
        drafts_as = ops.recording_rules.drafts_as if can_record else None
        decode_inputs = _decode_inputs(model, memory, media, recorded, recorded_sampler, drafts_as)

    def inputs(*others: SlotState) -> StepInputs:
        return StepInputs(
            table,
            embedded,
            token_types,
            [table, embedded, token_types, *(each for each in (memory.encoded, media) if each is not None), *others],
            _page_moves(memory, config.limits.block_size, may_outlast_steps=config.layout.num_workers == 1),
            decode_inputs,
            has_states=bool(memory.states),
            encoded=memory.encoded,
            media=media,
        )

    if not stage.is_last:
        return StageRunner(forward, inputs(), transfers, spans)
    drafts, heads = drafter(sampler), _heads(config, model, memory, forward, vector_heads, transfers, adapters)
    parts = None
    if not sequences.is_divided and not has_peers:
        parts = _parts(config, memory, forward, is_cached=is_cached)
    return ModelRunner(
        forward,
        recorded,
        inputs(sampler, *heads.values(), *([] if drafts is None else [drafts])),
        RowSampler(
            sampler,
            table,
            transfers,
            drafts,
            None if parts is None else parts.release,
            tells_drafts=config.layout.pipeline > 1,
        ),
        heads,
        transfers,
        spans,
        ForwardReads() if drafts is None else drafts.reads,
        None if drafts is None or not memory.states else StateRewind(forward, memory.states, table, media),
        parts,
        None
        if is_cached
        else RecordedSequences(
            forward, ops, enabled=can_record and not ops.recording_rules.row_counts, is_paused=is_profiled
        ),
    )


def _decode_inputs(
    model: Model,
    memory: RequestMemory,
    media: MediaInputs | None,
    recorded: RecordedSteps,
    sampler: RecordedSampler | None,
    drafts_as: DraftsAs | None,
) -> DecodeInputs:
    is_compressed = any(isinstance(layer, LatentKV) and layer.rate > 1 for layer in model.kv_layers)
    if model.state_layers or memory.encoded is not None or is_compressed:  # whose tokens are no rows of their own
        drafts_as = None
    return DecodeInputs(
        memory.table,
        recorded.choose_shape,
        has_first_rows=any(layer.num_first_rows for layer in model.state_layers),
        encoded=memory.encoded,
        shifts=None if media is None else media.shifts,
        sampler=sampler,
        drafts_as=drafts_as,
    )


def _heads(
    config: EngineConfig,
    model: Model,
    memory: RequestMemory,
    forward: Forward,
    vectors: Mapping[str, VectorHead],
    transfers: Transfers,
    adapters: Adapters | None,
) -> dict[OutputKind, Head]:
    size, compute_logits = config.spec.vocab_size, forward.compute_logits
    heads: dict[OutputKind, Head] = {
        OutputKind.PROMPT_LOGPROBS: PromptScorer(compute_logits, size, config.logprobs_mode, transfers),
        OutputKind.HIDDEN_STATES: TokenVectors(vectors, transfers, adapters),
        OutputKind.POOLED: Pooler(vectors, transfers, compute_logits, size, adapters),
    }
    if isinstance(model, AlignsTokens) and memory.encoded is not None:
        heads[OutputKind.ALIGNMENT] = _aligner(config, model, memory, memory.encoded, transfers)
    return heads


def _aligner(
    config: EngineConfig, model: AlignsTokens, memory: RequestMemory, encoded: EncodedInputs, transfers: Transfers
) -> Aligner:
    caches = memory.caches[len(memory.caches) - len(model.aligners) :]
    layers = [CrossLayerCache(*pair) for pair in zip(model.aligners, caches, strict=True)]
    return Aligner(layers, encoded, int(config.spec.hf_config.get("median_filter_width", 7)), transfers)


def _sampler(config: EngineConfig, ops: Backend, custom: Sequence[CustomFeature], transfers: Transfers) -> Sampler:
    spec = config.spec
    return Sampler(
        config.limits.max_num_seqs,
        spec.vocab_size,
        spec.eos_token_ids,
        ops=ops,
        logprobs_mode=config.logprobs_mode,
        custom=custom,
        transfers=transfers,
    )


def _recorded_sampler(
    config: EngineConfig, sampler: Sampler, ops: Backend, table: RequestTable
) -> RecordedSampler | None:
    """Returns what chooses tokens inside of graphs. None on a CPU, where a recording is a list of kernels of layers."""
    if table.device.type == "cpu":
        return None
    rows = largest_step(rules_for(ops.recording_rules, config.graphs), config.limits.max_num_seqs)
    return RecordedSampler(sampler, ops.sampling, table, rows)


def _parts(config: EngineConfig, memory: RequestMemory, forward: Forward, *, is_cached: bool) -> StepInParts | None:
    """Returns what runs a step in parts, or None where other ranks would have to know of it."""
    if config.layout.num_workers > 1:
        return None
    spec = config.spec
    return StepInParts(
        forward,
        memory.table,
        spec.vocab_size,
        spec.hidden_size,
        has_states=bool(memory.states),
        can_restart=not forward.forgets_tokens,
        can_cut=is_cached and not forward.sees_prompts,
    )


def _page_moves(memory: RequestMemory, block_size: int, *, may_outlast_steps: bool) -> PageMoves:
    tiers: dict[Tier, PageTier] = dict(memory.tiers)
    if memory.states:
        tiers["state"] = SlotStates(memory.states)
    return PageMoves(CachePages(memory.pages), tiers, block_size, may_outlast_steps=may_outlast_steps)


def _choose_forward(
    config: EngineConfig,
    model: Model,
    memory: RequestMemory,
    ops: Backend,
    stage: PipelineStage,
    sequences: ContextParallel,
    adapters: Adapters | None,
    *,
    has_peers: bool,
) -> Forward:
    slots = config.page_slots
    if isinstance(sequences, DividedContext) and sequences.divides_tokens:
        return DividedForward(model, ops, memory.caches, slots, stage, sequences, adapters)
    return Forward(
        model, ops, memory.caches, slots, memory.states, stage, sequences, adapters=adapters, has_peers=has_peers
    )  # fmt: skip
