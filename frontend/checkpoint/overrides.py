"""Applies `--hf-overrides` to config.json, by whichever of its names each side calls a field."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.rotary import override_rotation

_DECIDE_LAYER_TYPES = ("sliding_window_pattern", "use_sliding_window", "max_window_layers", "full_attention_interval")
"""Fields that configurations without `layer_types` have instead."""

_OUTER = ("architectures", "model_type", "text_config")
"""What a wrapper says of itself."""


def override(
    config: dict[str, Any], overrides: Mapping[str, Any], aliases: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """Applies `overrides` to `config`. Overrides of a wrapper's language model go to its `text_config`.

    Objects are merged. `aliases` are names of the same field: all of them that `config` has get the new value.

    Raises:
        ConfigError: a text_config that is no object, or older names of a rotation where layers of several kinds have
            their own.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return _override(config, overrides, aliases)
    inner, outer = overrides.get("text_config", {}), {}
    if not isinstance(inner, dict):
        raise ConfigError(f"--hf-overrides: text_config must be an object, got {inner!r}.")
    inner = dict(inner)
    for name, value in overrides.items():
        if name in config and name != "text_config":
            outer[name] = value
        if name not in config or (name in text and name not in _OUTER):
            inner.setdefault(name, value)
    return {**_override(config, outer, aliases), "text_config": _override(text, inner, aliases)}


def _override(config: dict[str, Any], overrides: Mapping[str, Any], aliases: Sequence[Sequence[str]]) -> dict[str, Any]:
    merged = _merge(config, overrides)
    for names in aliases:
        new = next((overrides[name] for name in names if name in overrides), None)
        if new is not None:
            merged.update({name: new for name in names if name in config and name not in overrides})
    if "torch_dtype" in overrides and "dtype" not in overrides:
        merged["dtype"] = overrides["torch_dtype"]
    if "layer_types" not in overrides and any(name in overrides for name in _DECIDE_LAYER_TYPES):
        merged.pop("layer_types", None)
    return override_rotation(config, merged, overrides)


def _merge(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `overrides` merged into it, recursively."""
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
