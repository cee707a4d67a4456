"""Resolves how drafts are made, and reads what describes the checkpoint that they come from."""

from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from quire.core.config.engine_args import EngineArgs
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.pooling import PoolingSpec
from quire.core.config.resolved import DraftMethod, DraftModelConfig, ModelSpec
from quire.core.config.speculative import (
    METHODS,
    MOST_DRAFTS,
    OFF,
    Speculation,
    SpeculativeConfig,
    SpeculativeOptions,
    method_of,
)
from quire.core.errors import ConfigError
from quire.core.wire.rank import Layout
from quire.frontend.checkpoint import model_source
from quire.frontend.checkpoint.draft_heads import own_heads, read_heads, read_named_target
from quire.frontend.launch.draft_vocabulary import share_vocabulary


def read_draft(args: EngineArgs, target: ModelSpec, load: LoadConfig | None = None) -> ModelSpec | None:
    """Finds the checkpoint of a method that reads one, and reads its specification; None: none does.

    Args:
        target: whose tokens are drafted.
        load: how it is found; None: as the options say.

    Raises:
        ConfigError: there is no such checkpoint, or an option is wrong.
    """
    options = args.speculative.options
    if options is None or options.method == OFF or options.names_no_method:
        return None
    method = method_of(options)
    heads = next((name for name in get_args(DraftMethod) if name == method), None)
    if heads is not None and METHODS[method].checkpoint == "target":
        return own_heads(target, heads)
    if METHODS[method].checkpoint != "own":
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
    if heads is not None:
        return read_heads(folder, model, heads, target)
    return model_source.read_model_spec(folder, model)


def follow_draft(args: EngineArgs, folder: Path) -> tuple[EngineArgs, Path]:
    """Returns the options and the folder of the target, where `folder` has a draft that names it; else as they are.

    Raises:
        ConfigError: the target is not found, or another draft is asked for as well.
    """
    named = read_named_target(folder)
    if named is None:
        return args, folder
    options = args.speculative.options or SpeculativeOptions()
    if options.model is not None or options.method not in (None, named.method):
        raise ConfigError(
            f"{args.model.model} is itself a draft, for {named.target}: serve that with --speculative-config, or leave "
            "its method and model out."
        )
    options = replace(
        options,
        method=named.method,
        model=args.model.model,
        revision=args.model.revision,
        num_speculative_tokens=options.num_speculative_tokens or named.num_tokens,
    )
    model = replace(
        args.model,
        model=named.target,
        revision=None,
        served_model_name=args.model.served_model_name or [str(args.model.model)],
    )
    args = replace(args, model=model, speculative=SpeculativeConfig(speculative_config=options))
    return args, model_source.find_model(model, args.load)


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
    if options is not None and options.method == OFF:
        return None, None
    obstacle = _obstacle(layout, pooling, reads_checkpoint=draft is not None)
    if obstacle is not None and options is not None:
        raise ConfigError(f"--speculative-config: {obstacle}")
    if obstacle is not None or (options is None and layout.shares_experts):  # such engines take all steps together
        return None, None
    speculation = Speculation.of(options)
    if draft is None or options is None:
        return speculation, None
    if not speculation.num_tokens:
        num_tokens = min(draft.hf_config["num_drafts"], MOST_DRAFTS)
        speculation = replace(speculation, num_tokens=num_tokens, most_drafts=max(num_tokens, speculation.most_drafts))
    size = options.draft_tensor_parallel_size
    if size not in (None, layout.tensor):
        raise ConfigError(
            f"--speculative-config.draft_tensor_parallel_size {size}: the ranks divide a draft model as they divide "
            f"the target; leave it out, or make it {layout.tensor}."
        )
    if draft.drafts_by is None and draft.vocab_size < spec.vocab_size and not options.use_heterogeneous_vocab:
        raise ConfigError(
            f"--speculative-config.model {draft.name} has {draft.vocab_size} tokens, fewer than the {spec.vocab_size} "
            f"of {spec.name}: choose a draft model with the same tokenizer, or set use_heterogeneous_vocab."
        )
    if options.parallel_drafting and draft.drafts_by is None:
        speculation = replace(speculation, mask_token_id=_mask_token_of(draft, spec))
    model = DraftModelConfig(
        spec=replace(draft, dtype=spec.dtype) if args.model.dtype != "auto" else draft,
        num_tokens=speculation.num_tokens,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        vocabulary=share_vocabulary(spec, draft) if options.use_heterogeneous_vocab else None,
    )
    return speculation, model


def _mask_token_of(draft: ModelSpec, target: ModelSpec) -> int:
    """Returns the token in whose places a draft model makes drafts at once (PARD, arXiv:2504.18583).

    Raises:
        ConfigError: config.json names none, or none of the target's.
    """
    fields = ("pard_token", "ptd_token_id")
    mask = next((draft.hf_config[name] for name in fields if draft.hf_config.get(name) is not None), None)
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise ConfigError(
            f"--speculative-config.parallel_drafting: config.json of {draft.name} must name a mask token as "
            f"{' or '.join(fields)}, 0 to {target.vocab_size - 1}, got {mask!r}. Take a draft model that was trained "
            "with one, or leave parallel_drafting out."
        )
    return mask


def _obstacle(layout: Layout, pooling: PoolingSpec | None, *, reads_checkpoint: bool) -> str | None:
    """The reason why this engine can make no drafts; None if it can."""
    if pooling is not None:
        return "a model that makes vectors samples no tokens; leave it out."
    if reads_checkpoint and (layout.sequence > 1 or layout.shares_experts or layout.pipeline > 1):
        return (
            "a draft model runs where each rank has all layers and all tokens of its engine; take ngram or suffix, or "
            "leave out --pipeline-parallel-size, --decode-context-parallel-size, --prefill-context-parallel-size and "
            "--enable-expert-parallel."
        )
    return None
