"""Refuses models and layouts that speculation cannot serve."""

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model
from quire.executor.step.speculator import ForwardReads


def check_layout(config: EngineConfig) -> None:
    """Refuses layouts of ranks.

    Raises:
        ModelLoadError: drafts do not reach all ranks, or a draft model's tokens would have to be divided.
    """
    layout = config.layout
    if layout.pipeline > 1:
        raise ModelLoadError(
            "Drafts lie on the pipeline stage that samples, where the first stage does not find them: serve "
            "without drafts, or without --pipeline-parallel-size."
        )
    if config.draft_model is not None and config.limits.num_lookahead_tokens < config.draft_model.num_tokens:
        raise ModelLoadError(
            f"A draft model that proposes {config.draft_model.num_tokens} tokens needs room for as many in each "
            f"request's pages, got num_lookahead_tokens {config.limits.num_lookahead_tokens}."
        )
    if config.draft_model is not None and (layout.sequence > 1 or layout.shares_experts):
        raise ModelLoadError(
            "A draft model runs where each rank has all tokens of its engine: serve without one, or without "
            "--decode-context-parallel-size, --prefill-context-parallel-size, and experts that engines share."
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
