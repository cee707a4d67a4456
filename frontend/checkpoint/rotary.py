"""Rotary embeddings in config.json, in the form of Transformers 5 or in older ones: `rope_parameters`, or `rope_theta`,
`rope_scaling` and `partial_rotary_factor`."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ConfigError

_OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_LOCAL = "rope_local_base_freq"
"""The base of layers with a window, in older configurations of Gemma."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def unite(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` with one of the two forms, where it has both: as Transformers does, `rope_scaling` counts.

    If rotations differ by the kind of layer, it changes the one of full-attention layers.
    """
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if not isinstance(scaling, dict) or not isinstance(parameters, dict) or not scaling or not parameters:
        return config
    if not _is_by_kind(parameters):
        return {**config, "rope_parameters": None}
    full = {**(parameters.get(_FULL) or {}), **scaling}
    return {**config, "rope_parameters": {**parameters, _FULL: full}, "rope_scaling": None}


def override_rotation(
    config: Mapping[str, Any], merged: dict[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """`merged`, made of `config` and `overrides`, with a rotation that the latter change in either form.

    A block that names another kind of scaling takes the place of the old one, whose base and partial rotation stay.

    Raises:
        ConfigError: older names, where layers of several kinds rotate in their own ways and none sees all tokens.
    """
    parameters, new = config.get("rope_parameters"), overrides.get("rope_parameters")
    if isinstance(new, dict):
        united = merged["rope_parameters"] if _is_by_kind(new) else _scaled(parameters or {}, new)
        return {**merged, "rope_parameters": united, "rope_scaling": None}
    if not isinstance(parameters, dict) or not parameters:
        if not isinstance(overrides.get("rope_scaling"), dict):
            return merged
        return {**merged, "rope_scaling": _scaled(config.get("rope_scaling") or {}, overrides["rope_scaling"])}
    named = [name for name in (*_OLDER, _LOCAL) if name in overrides]
    if not named:
        return merged
    others = {name: value for name, value in merged.items() if name not in named or name in config}
    return {**others, "rope_scaling": None, "rope_parameters": _with_older(parameters, overrides, named)}


def _with_older(parameters: dict[str, Any], overrides: Mapping[str, Any], named: list[str]) -> dict[str, Any]:
    if not _is_by_kind(parameters):
        return _block_with_older(parameters, overrides)
    full = parameters.get(_FULL)
    if not isinstance(full, dict):
        raise ConfigError(
            f"--hf-overrides: {', '.join(named)} cannot tell which of the rotations is meant that config.json has in "
            f"rope_parameters: {', '.join(parameters)}. Override these."
        )
    blocks = {**parameters, _FULL: _block_with_older(full, overrides)}
    sliding = parameters.get(_SLIDING)
    if isinstance(sliding, dict):
        base = overrides["rope_theta"] if "rope_theta" in overrides and _have_one_base(full, sliding) else None
        base = overrides.get(_LOCAL, base)
        blocks[_SLIDING] = sliding if base is None else {**sliding, "rope_theta": base}
    return blocks


def _block_with_older(block: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if "rope_scaling" in overrides:
        block = _scaled(block, overrides["rope_scaling"] or {"rope_type": "default"})
    given = {name: overrides[name] for name in ("rope_theta", "partial_rotary_factor") if name in overrides}
    return {**block, **given}


def _scaled(block: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """`block` with the new `scaling`: merged, if it is of the same kind or names none."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None or kind == block.get("rope_type", block.get("type", "default")):
        return {**block, **scaling}
    kept = {name: block[name] for name in ("rope_theta", "partial_rotary_factor") if name in block}
    return {**kept, **scaling, "rope_type": kind}


def _have_one_base(block: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return block.get("rope_theta") == other.get("rope_theta")


def _is_by_kind(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in parameters.values())
