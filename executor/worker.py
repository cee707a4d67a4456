"""One rank: loads its model, plans and allocates its memory, and runs steps."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire import ops
from quire.core.config.resolved import EngineConfig
from quire.core.logging import get_logger
from quire.core.trace import NO_SPANS, SpanList, Spans
from quire.core.wire import function_call
from quire.core.wire.adapters import LOAD_ADAPTER
from quire.core.wire.kv_groups import keeps_nothing
from quire.core.wire.protocol import (
    START_PROFILE,
    STOP_PROFILE,
    StepPlan,
    StepResult,
    WorkerAnswer,
    WorkerCall,
    WorkerReady,
)
from quire.core.wire.rank import Rank
from quire.executor.adapter_loader import AdapterLoader
from quire.executor.backends import bind
from quire.executor.device import device_name, device_of
from quire.executor.layers.adapters import AdapterLimits, Adapters
from quire.executor.layers.attention.layer_kv import LatentKV, LayerKV
from quire.executor.layers.experts.balancer import ExpertBalancer
from quire.executor.layers.experts.parallel import ExpertParallel
from quire.executor.loaded_model import LoadedModel, ModelRole, load_models
from quire.executor.memory import plan as memory
from quire.executor.memory.first_touch import touch_behind
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.memory.state_layout import describe_states
from quire.executor.models.base import HasTaskAdapters, LayerCache, Model, ReadsMedia
from quire.executor.models.registry import import_model
from quire.executor.parallel.context.divided import context_parallel
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.lockstep import Lockstep
from quire.executor.parallel.stage_neighbours import StageNeighbours
from quire.executor.sampling.custom import CustomFeature, ProcessorContext, load_processors
from quire.executor.sampling.sampler import Sampler
from quire.executor.step.drafting.drafter import Drafter
from quire.executor.step.drafting.forced_pieces import ForcedPieces
from quire.executor.step.drafting.method import LoadedDraft, Method, MethodParts
from quire.executor.step.drafting.methods import find_method
from quire.executor.step.drafting.predictions import Predictions
from quire.executor.step.encoded_inputs import EncodedInputs
from quire.executor.step.forward import Forward
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.model_runner import ModelRunner
from quire.executor.step.page_tiers import lower_tiers
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.runner_builder import RequestMemory, build_runner
from quire.executor.step.speculation_checks import check_layout, check_states, check_target, takes_drafts_back
from quire.executor.step.speculator import Speculator
from quire.executor.step.stage import PipelineStage
from quire.executor.step.stage_runner import StageRunner
from quire.executor.timed_ops import timed
from quire.executor.torch_profile import TorchProfile
from quire.executor.transfers import Transfers, transfers_from
from quire.ops.backend import ModelNeeds

logger = get_logger(__name__)

T = TypeVar("T")


def import_code(config: EngineConfig) -> None:
    """Imports what a worker will need that depends on its model; it touches no device."""
    import_model(config.spec)


class Worker:
    """Loads, allocates, then launches and collects steps, in this order.

    Args:
        config: the same for all ranks.
        rank: which of them this is.
        group: those with which it shares each layer's weights; already joined.
        stages: the ranks with the layers before and after this one's; None: this one has all layers.
        transfers: bring values to the host; None: the usual ones for the device.
        speculator: proposes drafts; None: the configuration's method does, if it names one.
        context_group: those with which it divides the positions of sequences, if any.
        lockstep: the ranks of all engines, where these share experts.
        num_host_pages: pages of the tier "host", beside the KV cache.
        adapter_limits: the adapters that the model's linear layers shall have memory for; None: those of `config`.

    Attributes:
        adapters: those of the linear layers, once the model is loaded; None: they take none.
        peers: ranks that take every step together with this one; None: it depends on its engine's plans alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: Rank,
        group: ParallelGroup,
        transfers: Transfers | None = None,
        speculator: Speculator | None = None,
        *,
        stages: StageNeighbours | None = None,
        context_group: ParallelGroup | None = None,
        lockstep: Lockstep | None = None,
        adapter_limits: AdapterLimits | None = None,
        num_host_pages: int = 0,
    ) -> None:
        self._config = config
        self._rank = rank
        self._group = group
        self._stages = stages
        self._is_last = rank.pipeline == config.layout.pipeline - 1
        self._sequences = context_parallel(config, group, context_group)
        self.peers = lockstep
        self.adapters: Adapters | None = None
        self._adapter_limits = adapter_limits or AdapterLimits.of(config.adapters)
        self._adapter_loader: AdapterLoader | None = None
        self._num_host_pages = num_host_pages
        self._device = device_of(config, rank)
        self._speculator = speculator
        self._method = _method_of(config) if speculator is None else None
        self._transfers = transfers or transfers_from(self._device)
        self._ops = bind(config.device, serves=True)
        self._spans: Spans = NO_SPANS
        self._profile: TorchProfile | None = None
        if config.trace_folder is not None:
            self._spans = SpanList()
        elif config.torch_profile is not None:
            self._spans = self._profile = TorchProfile(config.torch_profile, rank, self._device)
        if self._spans is not NO_SPANS:
            self._ops = timed(self._ops, self._spans)
        self._models: dict[ModelRole, LoadedModel] = {}
        self._experts: ExpertParallel | None = None
        self._balancer: ExpertBalancer | None = None
        self._memory: RankMemory | None = None
        self._processors: list[CustomFeature] = []
        self._runner: ModelRunner | StageRunner | None = None
        self._calls: dict[str, Callable[[bytes], bytes]] = {}
        if self._profile is not None:
            self._calls |= {START_PROFILE: self._profile.start, STOP_PROFILE: self._profile.stop}
        if config.allow_insecure_serialization:
            self._calls[function_call.FUNCTION_CALL] = functools.partial(function_call.run, self)

    def load(self) -> WorkerReady:
        """Builds the model with its weights, and reports how much KV cache fits beside it.

        Raises:
            ModelLoadError: the checkpoint is unusable, or does not fit in memory.
        """
        config, spec = self._config, self._config.spec
        if self._speculator is not None or self._method is not None:
            check_layout(config)
        num_ranks = config.layout.num_local * config.num_engines_loading
        free = memory.device_memory(self._device, num_ranks, reserved_bytes=config.spare_bytes)
        started = time.monotonic()
        if self._is_last:
            processors = ProcessorContext(config.limits.max_num_seqs, spec.vocab_size, self._device)
            self._processors = load_processors(config.logits_processors, processors)
        self._models = load_models(
            config,
            self._rank,
            self._ops,
            self._device,
            free,
            self._group,
            sequences=self._sequences,
            lockstep=self.peers,
            adapters=self._adapter_limits,
        )
        ops.settle(config.device)
        loaded, draft = self._models["target"], self._models.get("draft")
        seconds = time.monotonic() - started
        logger.info("weights of %s, %s, loaded in %.1f s", spec.name, memory.describe(loaded.weights_bytes), seconds)
        if config.device != "cpu":
            logger.info("operations run on %s", device_name(self._device))
        if self._speculator is not None:
            check_target(config, loaded.model, self._speculator.reads)
        if self._method is not None:
            check_target(config, loaded.model, self._method.reads_of(config))
            self._method.check(config, loaded.model, None if draft is None else draft.model)
        self._experts = loaded.experts
        self.adapters = loaded.adapters
        if config.adapters is not None and loaded.adapters is not None:
            of_task = loaded.model.task_adapter if isinstance(loaded.model, HasTaskAdapters) else None
            self._adapter_loader = AdapterLoader(loaded.adapters, config.adapters, self._device, of_task)
        if config.eplb is not None and self._experts is not None and self._experts.layers:
            self._balancer = ExpertBalancer(config.eplb, self._experts, logs=self._rank.is_first)
        held = self._memory = RankMemory.of(
            config,
            loaded.stages,
            self._rank.pipeline,
            sum(each.weights_bytes for each in self._models.values()),
            self._ops,
            self._device,
            None if draft is None else (draft.config, draft.model),
        )
        if self._speculator is not None or self._method is not None:
            check_states(config, held.groups)
        if self._rank.is_first:
            logger.info("KV cache: %s", "; ".join([str(held.pages), *describe_states(held.groups)]))
        plan = held.plan(config, memory.still_free(free, held.needs.weights_bytes, self._device))
        media = loaded.model.media if isinstance(loaded.model, ReadsMedia) else None
        return WorkerReady(
            rank=self._rank,
            num_pages=plan.num_pages,
            max_model_len=plan.max_model_len,
            weights_bytes=held.needs.weights_bytes,
            kv_cache_bytes=plan.num_pages * held.pages.page_bytes,
            device_name=device_name(self._device),
            kv_groups=held.groups,
            reads=[] if media is None else list(media.modalities),
            media_spans=media is not None and media.sees_both_ways,
            media_rows=memory.num_media_rows(spec, loaded.model, config.limits),
            whole_prompts=keeps_nothing(held.groups)
            or any(layer.sees_prompt for stage in loaded.stages for layer in stage.kv_layers),
        )

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Sets up a KV cache of `num_pages` pages and a table for sequences of up to `max_model_len` tokens."""
        assert self._memory is not None, "load() comes before allocate()"
        config, limits = self._config, self._config.limits
        # Tokens of other ranks' parts, and of padding, are written to an extra page after those that the scheduler
        # knows.
        has_spare = self._sequences.is_divided or bool(self._ops.recording_rules.row_counts)
        pages, caches = self._memory.allocate_pages(num_pages + 1 if has_spare else num_pages)
        states = self._memory.states.allocate(limits.max_num_seqs)
        layers = [layer for each in self._models.values() for layer in each.model.kv_layers]
        dtypes = {cache.pages.dtype for layer, cache in zip(layers, caches, strict=True) if isinstance(layer, LayerKV)}
        has_latents = any(isinstance(layer, LatentKV) for layer in layers)
        self._ops.prepare(ModelNeeds(dtypes, has_latents, bool(states), self.adapters is not None))
        if self._device.type == "cpu" and num_pages:
            touch_behind(pages, config.page_slots, config.first_touch_seconds)
        table = RequestTable(
            limits.max_num_seqs,
            max_model_len + limits.num_lookahead_tokens,
            limits.block_size,
            self._device,
            self._memory.num_block_tables,
            self._sequences,
            num_pages,
            0 if self._adapter_limits is None else self._adapter_limits.num_adapters,
        )
        model = self.get_model()
        self._runner = build_runner(
            config,
            model,
            RequestMemory(
                table,
                pages,
                caches[: len(model.kv_layers)],
                states,
                lower_tiers(pages, self._num_host_pages),
                EncodedInputs.of(config, self._memory.num_cross_groups, self._device),
            ),
            self._ops,
            self._transfers,
            self._spans,
            stage=PipelineStage.of(config, self._rank, model, self._stages, self._device),
            sequences=self._sequences,
            adapters=self.adapters,
            has_peers=self.peers is not None,
            custom=self._processors,
            drafter=functools.partial(self._drafter, table, caches[len(model.kv_layers) :], max_model_len),
            vector_heads=self._models["target"].vector_heads,
            is_profiled=self._is_profiled,
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts one step; see `ModelRunner.launch`."""
        assert self._runner is not None, "allocate() comes before launch()"
        step = self._runner.launch(plan)
        if self._balancer is not None and plan.slots:
            self._balancer.after_step()
        return step

    def run_dummy_step(self) -> None:
        """Runs this rank's share of a step in which only other engines have tokens."""
        assert self._experts is not None, "a worker with peers has experts"
        self._experts.run_dummy_step()
        if self._balancer is not None:
            self._balancer.after_step()

    def collect(self, step: LaunchedStep) -> StepResult:
        """Reads the result of a step; see `ModelRunner.collect`."""
        assert self._runner is not None
        result = self._runner.collect(step)
        if self._balancer is not None:
            result.expert_balancedness = self._balancer.balancedness
        if self._profile is not None:
            self._profile.step()
        return result

    def call(self, call: WorkerCall, answer: Callable[[WorkerAnswer], None]) -> None:
        """Runs a call between steps. Only the names in the table exist; a failure is part of the answer.

        The answer to a load of an adapter comes later, from another thread.
        """
        if call.name == LOAD_ADAPTER and self._adapter_loader is not None:
            self._adapter_loader.load(
                call.payload, lambda result: answer(WorkerAnswer(call.call_id, self._rank, result))
            )
            return
        try:
            done = WorkerAnswer(call.call_id, self._rank, self._calls[call.name](call.payload))
        except Exception as error:  # a program's function may raise anything
            logger.exception("the call %r failed", call.name)
            done = WorkerAnswer(call.call_id, self._rank, error=f"{type(error).__name__}: {error}")
        answer(done)

    def get_model(self) -> Model:
        """Returns the target model, for functions that a program runs on its workers."""
        assert self._models, "load() comes before get_model()"
        return self._models["target"].model

    def apply_model(self, function: Callable[[Model], T]) -> T:
        """Returns the result of `function` on the model."""
        return function(self.get_model())

    def _drafter(
        self, table: RequestTable, caches: Sequence[LayerCache], max_model_len: int, sampler: Sampler
    ) -> Drafter | None:
        """Builds what proposes drafts. `caches` are those of the draft model's layers."""
        speculation = self._config.speculation
        method = self._speculator
        if self._method is not None and speculation is not None:
            parts = MethodParts(
                self._config,
                speculation,
                self.get_model(),
                self._loaded_draft(table, caches),
                table,
                sampler,
                max_model_len,
            )
            method = self._method.build(parts)
        assert self._memory is not None
        if not takes_drafts_back(self._config, self._memory.groups):
            return None
        if speculation is None:
            return None if method is None else Drafter(method, [], 0)
        return Drafter(method, [ForcedPieces(sampler), Predictions(table)], speculation.most_drafts)

    def _loaded_draft(self, table: RequestTable, caches: Sequence[LayerCache]) -> LoadedDraft | None:
        draft, config = self._models.get("draft"), self._config
        if draft is None:
            return None
        forward = Forward(draft.model, self._ops, caches, config.page_slots)
        recorded = RecordedSteps(
            forward,
            self._ops,
            table.max_seq_len,
            graphs=config.graphs,
            enabled=config.layout.num_workers == 1 and not draft.config.enforce_eager,
            is_paused=self._is_profiled,
        )
        return LoadedDraft(draft.config.spec, draft.model, forward, recorded)

    def _is_profiled(self) -> bool:
        """Returns True if each operation has to be called separately, because torch's profiler sees none in a
        recording.
        """
        return self._profile is not None and self._profile.is_running and self._device.type == "cpu"


def _method_of(config: EngineConfig) -> type[Method] | None:
    speculation = config.speculation
    if speculation is None or speculation.method is None:
        return None
    return find_method(speculation.method)
