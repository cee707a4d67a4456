"""Resolves how drafts are made, and reads what describes the checkpoint that they come from."""

from msgspec.structs import replace

from quire.core.config.engine_args import EngineArgs
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.pooling import PoolingSpec
from quire.core.config.resolved import DraftModelConfig, ModelSpec
from quire.core.config.speculative import METHODS, Speculation, method_of
from quire.core.errors import ConfigError
from quire.core.wire.rank import Layout
from quire.frontend.checkpoint import model_source


def read_draft(args: EngineArgs, load: LoadConfig | None = None) -> ModelSpec | None:
    """Finds the checkpoint of a method that reads one of its own, and reads its specification; None: none does.

    Args:
        load: how it is found; None: as the options say.

    Raises:
        ConfigError: there is no such checkpoint, or an option is wrong.
    """
    options = args.speculative.options
    if options is None or METHODS[method_of(options)].checkpoint != "own":
        return None
    Speculation.of(options)
    model = ModelConfig(
        model=options.model,
        revision=options.revision,
        hf_token=args.model.hf_token,
        dtype=args.model.dtype,
        trust_remote_code=args.model.trust_remote_code,
    )
    try:
        folder = model_source.find_model(model, load or args.load)
    except ConfigError as error:
        raise ConfigError(f"--speculative-config.model {options.model}: {error}") from None
    return model_source.read_model_spec(folder, model)


def resolve_speculation(
    args: EngineArgs, spec: ModelSpec, layout: Layout, pooling: PoolingSpec | None, draft: ModelSpec | None
) -> tuple[Speculation | None, DraftModelConfig | None]:
    """Returns how drafts are made, and the checkpoint that they come from; (None, None): there are none.

    Args:
        draft: what `read_draft` has read.

    Raises:
        ConfigError: drafts are asked for where none can be made.
    """
    options = args.speculative.options
    obstacle = _obstacle(layout, pooling, reads_checkpoint=draft is not None)
    if obstacle is not None and options is not None:
        raise ConfigError(f"--speculative-config: {obstacle}")
    if obstacle is not None or (options is None and layout.shares_experts):  # such engines take all steps together
        return None, None
    speculation = Speculation.of(options)
    if draft is None or options is None:
        return speculation, None
    size = options.draft_tensor_parallel_size
    if size not in (None, layout.tensor):
        raise ConfigError(
            f"--speculative-config.draft_tensor_parallel_size {size}: the ranks divide a draft model as they divide "
            f"the target; leave it out, or make it {layout.tensor}."
        )
    if draft.vocab_size < spec.vocab_size:
        raise ConfigError(
            f"--speculative-config.model {draft.name} has {draft.vocab_size} tokens, fewer than the {spec.vocab_size} "
            f"of {spec.name}: choose a draft model with the same tokenizer."
        )
    model = DraftModelConfig(
        spec=replace(draft, dtype=spec.dtype) if args.model.dtype != "auto" else draft,
        num_tokens=speculation.num_tokens,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    return speculation, model


def _obstacle(layout: Layout, pooling: PoolingSpec | None, *, reads_checkpoint: bool) -> str | None:
    """The reason why this engine can make no drafts; None if it can."""
    if pooling is not None:
        return "a model that makes vectors samples no tokens; leave it out."
    if layout.pipeline > 1:
        return (
            "drafts lie on the pipeline stage that samples, where the first stage does not find them; leave it out, or "
            "--pipeline-parallel-size."
        )
    if reads_checkpoint and (layout.sequence > 1 or layout.shares_experts):
        return (
            "a draft model runs where each rank has all tokens of its engine; take ngram or suffix, or leave out "
            "--decode-context-parallel-size, --prefill-context-parallel-size and --enable-expert-parallel."
        )
    return None
