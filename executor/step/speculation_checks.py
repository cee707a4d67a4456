"""Refuses models and layouts that speculation cannot serve."""

from collections.abc import Sequence

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.models.base import Model
from quire.executor.step.speculator import ForwardReads


def check_layout(config: EngineConfig) -> None:
    """Refuses layouts of ranks.

    Raises:
        ModelLoadError: a draft model's layers or tokens would have to be divided.
    """
    layout = config.layout
    if config.draft_model is not None and config.limits.num_lookahead_tokens < config.draft_model.num_tokens:
        raise ModelLoadError(
            f"A draft model that proposes {config.draft_model.num_tokens} tokens needs room for as many in each "
            f"request's pages, got num_lookahead_tokens {config.limits.num_lookahead_tokens}."
        )
    if config.draft_model is not None and (layout.sequence > 1 or layout.shares_experts or layout.pipeline > 1):
        raise ModelLoadError(
            "A draft model runs where each rank has all layers and all tokens of its engine: serve without one, or "
            "without --pipeline-parallel-size, --decode-context-parallel-size, --prefill-context-parallel-size, and "
            "experts that engines share."
        )


def takes_drafts_back(config: EngineConfig, groups: Sequence[KVGroupSpec]) -> bool:
    """Returns False if ranks would keep the states of rejected drafts: only the last pipeline stage knows which those
    are.

    Args:
        groups: of the whole model.
    """
    return config.layout.pipeline == 1 or not any(group.is_recurrent for group in groups)


def check_states(config: EngineConfig, groups: Sequence[KVGroupSpec]) -> None:
    """Refuses a method for models where `takes_drafts_back` is False.

    Raises:
        ModelLoadError: the model is one of them.
    """
    if not takes_drafts_back(config, groups):
        raise ModelLoadError(
            f"{config.spec.name} has recurrent layers, and its pipeline stages cannot take back their states after a "
            "rejected draft: serve it without drafts, or without --pipeline-parallel-size."
        )


def check_target(config: EngineConfig, model: Model, reads: ForwardReads) -> None:
    """Refuses target models.

    Raises:
        ModelLoadError: the model does not show what the speculator reads, or would compute tokens again by itself.
    """
    name = config.spec.name
    if model.state_layers and config.layout.shares_experts:
        raise ModelLoadError(
            f"{name} has recurrent layers, which compute tokens again after a rejected draft, and engines that share "
            "experts take all steps together: serve it without drafts, or engines with experts of their own."
        )
    if reads.layers and max(reads.layers) >= model.num_layer_outputs:
        raise ModelLoadError(
            f"The speculator reads the output of layer {max(reads.layers)}, but {name} shows those of its first "
            f"{model.num_layer_outputs} layers: serve it without drafts."
        )
