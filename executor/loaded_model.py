"""Builds the model of one rank with its weights, from any form of checkpoint."""

import contextlib
import dataclasses
from typing import Literal

import torch

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire.rank import Rank
from quire.executor.layers.adapters import AdapterLimits, Adapters
from quire.executor.layers.experts.parallel import ExpertParallel
from quire.executor.layers.vocabulary import without_adapters
from quire.executor.memory.dry_build import dry_stages, held_bytes, packed_stages
from quire.executor.memory.plan import DeviceMemory, check_weights
from quire.executor.models.base import Model, ModelContext, ShowsEnds
from quire.executor.models.registry import build_model
from quire.executor.models.vector_heads import VectorHead, build_heads
from quire.executor.parallel.context.strategy import ContextParallel
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.lockstep import Lockstep
from quire.executor.weights.formats import open_weights
from quire.executor.weights.mtp_layers import num_mtp_layers
from quire.executor.weights.packed_state import open_packed
from quire.executor.weights.quantization.online import Online
from quire.executor.weights.quantization.per_layer import PerLayer
from quire.ops.backend import Backend

logger = get_logger(__name__)


ModelRole = Literal["target", "draft"]
"""The purpose of one of a worker's models: its tokens are the output, or it proposes tokens to the target."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A rank's model, and the parts of its context that steps need.

    Attributes:
        config: for this model, which is not the target's for others.
        weights_bytes: counted before any weight was read.
        stages: the models of all pipeline stages; `model` is one of them, and others are dry builds.
        experts: the division of whole experts over ranks; None: each rank has a part of each.
        adapters: the place of the layers' adapters; None: they take none.
        vector_heads: of the last stage, those that requests for vectors may name.
    """

    config: EngineConfig
    model: Model
    weights_bytes: int
    stages: list[Model]
    experts: ExpertParallel | None
    adapters: Adapters | None
    vector_heads: dict[str, VectorHead]


def load_models(
    config: EngineConfig,
    rank: Rank,
    ops: Backend,
    device: torch.device,
    free: DeviceMemory,
    group: ParallelGroup,
    *,
    sequences: ContextParallel | None = None,
    lockstep: Lockstep | None = None,
    adapters: AdapterLimits | None = None,
) -> dict[ModelRole, LoadedModel]:
    """Loads all models that `config` names, the target first; arguments and errors are those of `load_model`.

    Only the target's layers have memory for `adapters`.
    """
    configs: dict[ModelRole, EngineConfig | None] = {"target": config, "draft": config.of_draft_model()}
    models: dict[ModelRole, LoadedModel] = {}
    for role, each in configs.items():
        if each is not None:
            models[role] = load_model(
                each,
                rank,
                ops,
                device,
                free,
                group,
                sequences=sequences,
                lockstep=lockstep,
                adapters=adapters if role == "target" else None,
                target=None if role == "target" else models["target"].model,
            )
            free = dataclasses.replace(free, free_bytes=free.free_bytes - models[role].weights_bytes)
    return models


def load_model(
    config: EngineConfig,
    rank: Rank,
    ops: Backend,
    device: torch.device,
    free: DeviceMemory,
    group: ParallelGroup,
    *,
    sequences: ContextParallel | None = None,
    lockstep: Lockstep | None = None,
    adapters: AdapterLimits | None = None,
    target: Model | None = None,
) -> LoadedModel:
    """Builds the layers of `rank` with their weights, after a check that they fit into `free`.

    Args:
        group: the ranks that share each layer's weights.
        sequences: the division of positions over ranks; None: what `config` says, and the model will not run.
        lockstep: the ranks of all engines, if these share experts.
        adapters: those that the model's layers shall have memory for; None: none.
        target: the model that this one drafts for, whose weights it may share; None: it drafts for none.

    Raises:
        ModelLoadError: the checkpoint is unusable, or does not fit in memory.
    """
    spec = config.spec
    packed = open_packed(config, group.rank, ops, rank.pipeline)
    if packed is not None and spec.drafts_by is not None:
        raise ModelLoadError(
            f"{spec.name} has packed weights, which leave out layers that draft. Serve the checkpoint that they were "
            "packed from, or leave out --speculative-config."
        )
    if packed is not None and adapters is not None:
        raise ModelLoadError(
            f"{spec.name} has packed weights, whose gates have no outputs that adapters can change. Serve the "
            "checkpoint that they were packed from."
        )
    if packed is not None:
        check_weights(packed.num_bytes, free, spec.name)
        with contextlib.closing(packed), torch.inference_mode():
            context = ModelContext.of(config, ops, group, device, packed, packed, sequences=sequences)
            stages = packed_stages(config, rank, context)
            return _loaded(config, rank, stages[rank.pipeline], packed.num_bytes, stages, context)
    weights = open_weights(
        spec,
        config.load,
        getattr(torch, spec.dtype),
        quantization=config.quantization,
        rank=group.rank,
        num_ranks=group.size,
        expert_placement=config.expert_placement,
        seed=config.seed,
        show_progress=rank.is_first,
    )
    with contextlib.ExitStack() as closes, torch.inference_mode():
        if adapters is None:  # else those of DoRA measure the weights later
            closes.callback(weights.close)
        context = ModelContext.of(
            config, ops, group, device, weights, sequences=sequences, lockstep=lockstep, adapters=adapters
        )  # fmt: skip
        if isinstance(target, ShowsEnds):
            ends = without_adapters(target.embed), without_adapters(target.head)
            context = dataclasses.replace(context, target_ends=ends)
        stages = dry_stages(config, context)
        weights_bytes = held_bytes((target, stages[rank.pipeline])) - held_bytes(target)
        check_weights(weights_bytes, free, spec.name)
        if isinstance(context.scheme, Online | PerLayer) and rank.is_first:
            context.scheme.log_unquantized()
        num_mtp = num_mtp_layers(spec.hf_config, weights.shapes or ())
        if num_mtp and rank.is_first and not config.drafts_by("mtp"):
            logger.info("layers for multi-token prediction are not loaded: %d", num_mtp)
        model = build_model(spec, dataclasses.replace(context, layers=config.layers_of(rank.pipeline)))
        stages[rank.pipeline] = model
        return _loaded(config, rank, model, weights_bytes, stages, context)


def _loaded(
    config: EngineConfig, rank: Rank, model: Model, weights_bytes: int, stages: list[Model], context: ModelContext
) -> LoadedModel:
    if context.experts is not None and context.experts.group.size == 1:
        logger.warning("--enable-expert-parallel has no effect on one worker, which has all experts")
    is_last = rank.pipeline == config.layout.pipeline - 1
    heads = build_heads(config.spec, config.pooling, context, model) if is_last else {}
    return LoadedModel(config, model, weights_bytes, stages, context.experts, context.adapters, heads)
