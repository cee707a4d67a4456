"""Reads the configuration of layers that draft for a model: those of its own checkpoint, or of one beside it.

Their config.json is as the authors of a method write it, or as the package speculators does: with the layers' sizes in
`transformer_layer_config`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import DraftMethod, ModelSpec
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import make_model_spec, read_json, read_json_if_present

_EAGLE3_DEFAULTS = {"norm_before_residual": True}
"""Of the package speculators, where config.json says nothing."""


def own_heads(target: ModelSpec, method: DraftMethod) -> ModelSpec:
    """Returns the specification of the layers that the target's checkpoint has for `method`."""
    config = {**target.hf_config, "target_layers": []}
    return replace(target, drafts_by=method, hf_config=config)


def read_heads(folder: Path, model: ModelConfig, method: DraftMethod, target: ModelSpec) -> ModelSpec:
    """Reads the specification of the layers in `folder`, which draft for `target` by `method`.

    Raises:
        ConfigError: config.json is missing or damaged, or the layers are for another model.
    """
    path = folder / "config.json"
    stated = read_json(path)
    if method in _LAST_STATE:
        return _last_state_heads(stated, folder, model, method, target)
    stated = flat_config(stated, path)
    try:
        spec = make_model_spec(stated, folder, model, path, Path(target.tokenizer_path or target.path))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} describes no layers that draft ({error!r}). Download it again.") from error
    layers = _target_layers(stated, method, target, path)
    config = {
        **spec.hf_config,
        "target_layers": layers,
        "target_hidden_size": target.hidden_size,
        "num_drafts": _num_drafts(stated),
    }
    if method == "eagle" and spec.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{path}: hidden_size is {spec.hidden_size}, and that of {target.name} is {target.hidden_size}: take the "
            "layers that were trained for this model."
        )
    if spec.vocab_size < target.vocab_size and not config.get("draft_vocab_size"):
        raise ConfigError(
            f"{path}: vocab_size is {spec.vocab_size}, fewer than the {target.vocab_size} of {target.name}: take the "
            "layers that were trained for this model."
        )
    return replace(spec, drafts_by=method, dtype=target.dtype, hf_config=config)


class NamedTarget(NamedTuple):
    """What a draft's own config.json says about its use."""

    target: str
    method: DraftMethod
    num_tokens: int


def read_named_target(folder: Path) -> NamedTarget | None:
    """Reads the target that a draft of the package speculators names; None: `folder` has another kind of checkpoint.

    Raises:
        ConfigError: the method is not served, or config.json is damaged.
    """
    path = folder / "config.json"
    config = read_json_if_present(path)
    kind = config.get("speculators_model_type")
    if kind is None:
        return None
    method = next((name for name in get_args(DraftMethod) if name == kind), None)
    if method is None:
        raise ConfigError(
            f"{path}: drafts of the kind {kind!r} are not served; only {', '.join(get_args(DraftMethod))}."
        )
    verifier = (config.get("speculators_config") or {}).get("verifier")
    target = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(target, str) or not target:
        raise ConfigError(
            f"{path} names no target (name_or_path of speculators_config.verifier): serve the target, and name this "
            "folder as --speculative-config.model."
        )
    return NamedTarget(target, method, _num_drafts(config))


def _num_drafts(config: Mapping[str, Any]) -> int:
    """Returns the number of drafts that a config.json says, or else 3."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    numbers = (
        proposals[0].get("speculative_tokens"),
        config.get("n_predict"),
        config.get("medusa_num_heads"),
        config.get("num_heads"),
        config["block_size"] - 1 if isinstance(config.get("block_size"), int) else None,
    )
    return next((number for number in numbers if isinstance(number, int) and number > 0), 3)


_LAST_STATE: dict[DraftMethod, tuple[str, ...]] = {"medusa": ("hidden_size",), "mlp_speculator": ("emb_dim",)}
"""Methods whose layers read the last hidden state alone, and the fields that may say its size."""


def _last_state_heads(
    config: dict[str, Any], folder: Path, model: ModelConfig, method: DraftMethod, target: ModelSpec
) -> ModelSpec:
    """Returns a specification whose sizes are the target's: config.json has those of the heads alone.

    Raises:
        ConfigError: the heads are for another model.
    """
    sizes = dict.fromkeys(_LAST_STATE[method], target.hidden_size) | {"vocab_size": target.vocab_size}
    for name, size in sizes.items():
        if config.get(name) not in (None, size):
            raise ConfigError(
                f"{folder / 'config.json'}: {name} is {config[name]!r}, and that of {target.name} is {size}: take the "
                "heads that were trained for this model."
            )
    return replace(
        target,
        path=str(folder),
        name=model.model or folder.name,
        hf_config={**config, "target_layers": [], "num_drafts": _num_drafts(config)},
        config_json=config,
        drafts_by=method,
    )


def flat_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns a config.json whose fields are all outside, as the authors of the methods have them.

    Raises:
        ConfigError: the object with the layers' sizes is none.
    """
    field = "transformer_layer_config" if "speculators_model_type" in config else "model"
    inner = config.get(field, {} if field == "model" else None)
    if field == "model" and not isinstance(inner, dict):
        return dict(config)
    if not isinstance(inner, dict):
        raise ConfigError(f"{path}: {field} must be an object with the sizes of the layers, got {inner!r}.")
    defaults = _EAGLE3_DEFAULTS if config.get("speculators_model_type") == "eagle3" else {}
    if config.get("speculators_model_type") == "dflash":
        layers = config.get("aux_hidden_state_layer_ids") or []
        inner = {
            **inner,
            "dflash_config": {
                "mask_token_id": config.get("mask_token_id"),
                "target_layer_ids": [each - 1 for each in layers],
                "sample_from_anchor": config.get("sample_from_anchor", False),
            },
        }
    outer = {name: value for name, value in config.items() if name not in (field, "model_type") or not inner}
    stated = {**defaults, **inner, **{name: value for name, value in outer.items() if value is not None}}
    return {"architectures": ["LlamaForCausalLM"], **stated}


def _target_layers(config: Mapping[str, Any], method: DraftMethod, target: ModelSpec, path: Path) -> list[int]:
    """Returns the target's layers whose outputs are read; none: its last hidden states are.

    config.json names the layers whose inputs these are.

    Raises:
        ConfigError: a layer that the target does not have.
    """
    own = config.get("eagle_config") or {}
    if method == "dflash":
        return _layers_of_blocks(config, target, path)
    if method != "eagle3" or not own.get("use_aux_hidden_state", True):
        return []
    after = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    if not after:
        after = [2, target.num_layers // 2, target.num_layers - 3]
    if not isinstance(after, list) or not all(
        isinstance(each, int) and 0 < each <= target.num_layers for each in after
    ):
        raise ConfigError(
            f"{path}: eagle_aux_hidden_state_layer_ids must be layers of {target.name}, 1 to {target.num_layers}, got "
            f"{after!r}."
        )
    return [each - 1 for each in after]


def _layers_of_blocks(config: Mapping[str, Any], target: ModelSpec, path: Path) -> list[int]:
    """Returns the layers whose outputs DFlash reads.

    Raises:
        ConfigError: config.json names none, or one that the target does not have.
    """
    layers = (config.get("dflash_config") or {}).get("target_layer_ids")
    if (
        not isinstance(layers, list)
        or not layers
        or not all(isinstance(each, int) and 0 <= each < target.num_layers for each in layers)
    ):
        raise ConfigError(
            f"{path}: target_layer_ids of dflash_config must be layers of {target.name}, 0 to {target.num_layers - 1}, "
            f"got {layers!r}."
        )
    return layers
