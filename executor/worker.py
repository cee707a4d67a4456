"""One rank: chooses device and types, loads the model, plans its memory, and runs steps."""

import contextlib
import dataclasses
import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from quire import ops
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.core.trace import NO_SPANS, SpanList, Spans
from quire.core.wire import function_call
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
from quire.executor.backends import bind
from quire.executor.layers.context_parallel import ContextParallel
from quire.executor.layers.expert_balancer import ExpertBalancer
from quire.executor.layers.expert_parallel import ExpertParallel
from quire.executor.memory import plan as memory
from quire.executor.memory.dry_build import dry_stages, held_bytes
from quire.executor.memory.first_touch import touch_behind
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.memory.state_layout import describe_states
from quire.executor.models.base import Model, ModelContext, StagedModel
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup, StageNeighbours
from quire.executor.parallel.lockstep import Lockstep
from quire.executor.sampling.custom import CustomFeature, ProcessorContext, load_processors
from quire.executor.sampling.prompt_scorer import PromptScorer
from quire.executor.sampling.sampler import Sampler
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.divided_forward import DividedForward
from quire.executor.step.drafts import Drafter
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.forward import Forward
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.model_runner import ModelRunner
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.row_sampler import RowSampler
from quire.executor.step.slot_state import SlotState
from quire.executor.step.stage import Stage
from quire.executor.step.stage_runner import StageRunner
from quire.executor.step.state_snapshots import StateSnapshots
from quire.executor.step.step_inputs import StepInputs
from quire.executor.timed_ops import timed
from quire.executor.torch_profile import TorchProfile
from quire.executor.transfers import Transfers, transfers_from
from quire.executor.weights.ahead import num_layers_ahead
from quire.executor.weights.formats import open_weights
from quire.executor.weights.packed_state import open_packed

logger = get_logger(__name__)

T = TypeVar("T")


class Worker:
    """Loads, allocates, then launches and collects steps, in this order.

    Args:
        config: the same for all ranks.
        rank: which of them this is.
        group: those with which it shares each layer's weights; already joined.
        stages: the ranks with the layers before and after this one's; None: this one has all layers.
        transfers: bring values to the host; None: the usual ones for the device.
        drafter: proposes drafts; None: no drafts.
        context_group: those with which it divides the positions of sequences, if any.
        lockstep: the ranks of all engines, where these share experts.

    Attributes:
        peers: ranks that take every step together with this one; None: it depends on its engine's plans alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: Rank,
        group: ParallelGroup,
        transfers: Transfers | None = None,
        drafter: Drafter | None = None,
        *,
        stages: StageNeighbours | None = None,
        context_group: ParallelGroup | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ModelLoadError("--device cuda was asked for, but torch finds no CUDA device; use --device cpu.")
        self._config = config
        self._rank = rank
        self._group = group
        self._stages = stages
        self._is_last = rank.pipeline == config.layout.pipeline - 1
        self._context_group = context_group
        self.peers = lockstep
        self._device = torch.device(f"cuda:{config.layout.local_index(rank)}" if config.device == "cuda" else "cpu")
        self._drafter = drafter
        self._transfers = transfers or transfers_from(self._device)
        self._ops = bind(config.device)
        self._spans: Spans = NO_SPANS
        self._profile: TorchProfile | None = None
        if config.trace_folder is not None:
            self._spans = SpanList()
        elif config.torch_profile is not None:
            self._spans = self._profile = TorchProfile(config.torch_profile, rank, self._device)
        if self._spans is not NO_SPANS:
            self._ops = timed(self._ops, self._spans)
        self._model: Model | None = None
        self._sequences: ContextParallel | None = None
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
        if self._drafter is not None and config.layout.pipeline > 1:
            raise ModelLoadError(
                "Drafts lie on the pipeline stage that samples, where the first stage does not find them: serve "
                "without drafts, or without --pipeline-parallel-size."
            )
        free = memory.device_memory(self._device, config.layout.num_local * config.num_engines_loading)
        started = time.monotonic()
        if self._is_last:
            processors = ProcessorContext(config.limits.max_num_seqs, spec.vocab_size, self._device)
            self._processors = load_processors(config.logits_processors, processors)
        self._model, weights_bytes, stages = self._build_model(free)
        ops.settle(config.device)
        seconds = time.monotonic() - started
        logger.info("weights of %s, %s, loaded in %.1f s", spec.name, memory.describe(weights_bytes), seconds)
        if self._drafter is not None and any(model.state_layers for model in stages):
            raise ModelLoadError(
                f"{spec.name} has recurrent layers, whose state cannot go back when a draft is rejected: serve it "
                "without drafts."
            )
        held = self._memory = RankMemory.of(config, stages, self._rank.pipeline, weights_bytes, self._ops, self._device)
        if self._rank.is_first:
            logger.info("KV cache: %s", "; ".join([str(held.pages), *describe_states(held.groups)]))
        plan = held.plan(config, free)
        return WorkerReady(
            rank=self._rank,
            num_pages=plan.num_pages,
            max_model_len=plan.max_model_len,
            weights_bytes=weights_bytes,
            kv_cache_bytes=plan.num_pages * held.pages.page_bytes,
            device_name=_device_name(self._device),
            kv_groups=held.groups,
        )

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Sets up a KV cache of `num_pages` pages and a table for sequences of up to `max_model_len` tokens."""
        assert self._model is not None, "load() comes before allocate()"
        assert self._memory is not None
        spec, limits = self._config.spec, self._config.limits
        block_size = limits.block_size // self._config.layout.sequence
        shard = None if self._sequences is None else self._sequences.shard
        # Tokens of other ranks' parts are written to a page more, behind those that the scheduler knows.
        tensors, caches = self._memory.allocate_pages(num_pages if shard is None else num_pages + 1)
        states = self._memory.states.allocate(limits.max_num_seqs)
        if self._device.type == "cpu" and num_pages:
            touch_behind(tensors, block_size, self._config.first_touch_seconds)
        table = RequestTable(
            limits.max_num_seqs,
            max_model_len,
            limits.block_size,
            self._device,
            self._memory.num_block_tables,
            shard,
            num_pages,
        )
        stage, divided, has_peers = self._stage(self._model), self._sequences, self.peers is not None
        if divided is not None and divided.divides_tokens:
            forward: Forward = DividedForward(
                self._model, self._ops, caches, block_size, stage, divided.group, divided.shard
            )
        else:
            forward = Forward(self._model, self._ops, caches, block_size, states, stage, shard, has_peers=has_peers)
        embedded = EmbeddedPrompts(spec.hidden_size, getattr(torch, spec.dtype), self._device)

        def inputs(*others: SlotState) -> StepInputs:
            return StepInputs(
                table,
                embedded,
                [table, embedded, *others],
                DecodeInputs(table) if self._device.type == "cpu" and shard is None else None,
                StateSnapshots(states, tensors) if states else None,
            )

        if not self._is_last:
            self._runner = StageRunner(forward, inputs(), self._transfers, self._spans)
            return
        mode = self._config.logprobs_mode
        sampler = Sampler(
            limits.max_num_seqs,
            spec.vocab_size,
            spec.eos_token_ids,
            ops=self._ops,
            logprobs_mode=mode,
            custom=self._processors,
            transfers=self._transfers,
        )
        scorer = PromptScorer(spec.vocab_size, mode, self._transfers)
        drafters = [] if self._drafter is None else [self._drafter]
        self._runner = ModelRunner(
            forward,
            RecordedSteps(
                forward,
                self._ops,
                # What ranks say to each other cannot be recorded.
                enabled=self._config.layout.num_workers == 1 and not has_peers,
                is_paused=self._is_profiled,
            ),
            inputs(sampler, scorer, *drafters),
            RowSampler(sampler, table, self._transfers, self._drafter),
            scorer,
            self._transfers,
            self._spans,
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts one step; see `ModelRunner.launch`."""
        assert self._runner is not None, "allocate() comes before launch()"
        step = self._runner.launch(plan)
        if self._balancer is not None:
            self._balancer.after_step()
        return step

    def accompany(self) -> None:
        """Does this rank's share of a step in which its engine has no tokens, and its peers have some."""
        assert self._experts is not None, "a worker with peers has experts"
        self._experts.accompany()
        if self._balancer is not None:
            self._balancer.after_step()

    def collect(self, step: LaunchedStep) -> StepResult:
        """Reads the result of a step; see `ModelRunner.collect`."""
        assert self._runner is not None
        result = self._runner.collect(step)
        if self._profile is not None:
            self._profile.step()
        return result

    def call(self, call: WorkerCall) -> WorkerAnswer:
        """Does something beside the steps. Only the names in the table exist; a failure is part of the answer."""
        try:
            return WorkerAnswer(call.call_id, self._rank, self._calls[call.name](call.payload))
        except Exception as error:  # whatever a program's own function raises
            logger.exception("the call %r failed", call.name)
            return WorkerAnswer(call.call_id, self._rank, error=f"{type(error).__name__}: {error}")

    def _is_profiled(self) -> bool:
        """Whether each operation has to be called by itself, because torch's profiler sees none in a recording."""
        return self._profile is not None and self._profile.is_running and self._device.type == "cpu"

    def get_model(self) -> Model:
        """The model, for functions that a program has its workers run."""
        assert self._model is not None, "load() comes before get_model()"
        return self._model

    def apply_model(self, function: Callable[[Model], T]) -> T:
        """The result of `function` on the model."""
        return function(self.get_model())

    def _stage(self, model: Model) -> Stage:
        """This rank's place in the pipeline."""
        if self._stages is None:
            return Stage()
        assert isinstance(model, StagedModel)
        spec = self._config.spec
        return Stage(
            self._stages,
            is_first=self._rank.pipeline == 0,
            is_last=self._is_last,
            token_size=model.handover_size(spec.hidden_size),
            dtype=getattr(torch, spec.dtype),
            device=self._device,
        )

    def _build_model(self, free: memory.DeviceMemory) -> tuple[Model, int, list[Model]]:
        """The model, the bytes of its weights, which are counted before any weight is read, and the models of all
        pipeline stages, of which others are dry."""
        config, spec, stage = self._config, self._config.spec, self._rank.pipeline
        packed = open_packed(config, self._group.rank, self._ops)
        if packed is not None:
            memory.check_weights(packed.num_bytes, free, spec.name)
            with contextlib.closing(packed), torch.inference_mode():
                context = ModelContext.of(
                    config, self._ops, self._group, self._device, packed, packed, context_group=self._context_group
                )
                model = self._prepared(build_model(spec, context), context)
                return model, packed.num_bytes, [model]
        dtype = getattr(torch, spec.dtype)
        weights = open_weights(
            spec,
            config.load,
            dtype,
            quantization=config.quantization,
            rank=self._group.rank,
            num_ranks=self._group.size,
            expert_placement=config.expert_placement,
            seed=config.seed,
            show_progress=self._rank.is_first,
        )
        with contextlib.closing(weights), torch.inference_mode():
            context = ModelContext.of(
                config,
                self._ops,
                self._group,
                self._device,
                weights,
                context_group=self._context_group,
                lockstep=self.peers,
            )
            stages = dry_stages(config, context)
            weights_bytes = held_bytes(stages[stage])
            memory.check_weights(weights_bytes, free, spec.name)
            num_ahead = num_layers_ahead(spec.hf_config, weights.shapes or ())
            if num_ahead and self._rank.is_first:
                logger.info("layers for multi-token prediction are not loaded: %d", num_ahead)
            own = dataclasses.replace(context, layers=config.layers_of(stage))
            stages[stage] = self._prepared(build_model(spec, own), own)
            return stages[stage], weights_bytes, stages

    def _prepared(self, model: Model, context: ModelContext) -> Model:
        """The model; keeps what steps will need of its context."""
        self._sequences = context.sequences
        self._experts = experts = context.experts
        eplb = self._config.eplb
        if experts is not None and experts.group.size == 1:
            logger.warning("--enable-expert-parallel has no effect on one worker, which has all experts")
        if eplb is not None and experts is not None and experts.layers:
            self._balancer = ExpertBalancer(eplb, experts, logs=self._rank.is_first)
        return model


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().split("\n")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
