"""Fills in what config.json leaves to the defaults of its configuration class of Transformers.

config_defaults.json has the defaults; `scripts/config_defaults.py` writes it. Layers of a config that follow from
other fields, such as `layer_types`, are the business of the models' files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from quire.frontend.checkpoint.rotary import unite

_PATH = Path(__file__).with_suffix(".json")
_OUTER = ("architectures", "model_type")
"""What a model with a text model inside says of itself."""
_ENDS = "eos_token_id"
_WHOLE = ("dtype", "torch_dtype", "quantization_config", _ENDS)
"""What such a model says of all its parts."""
_SHARED = ("tie_word_embeddings",)
"""What such a model says of its text model, unless that says it itself."""


class TextDefaults(Struct, frozen=True):
    """How a class with a text model inside takes `text_config`."""

    type: str  # of a `text_config` that names none; of any, if `is_fixed`
    is_fixed: bool = False
    fields: dict[str, Any] = {}  # defaults where there is no `text_config`


class ConfigDefaults(Struct, frozen=True):
    """The values of a configuration class for fields that are left out."""

    fields: dict[str, Any] = {}
    aliases: dict[str, str] = {}  # other names → the fields that they set
    architectures: list[str] = []  # classes that are named after the model type
    text: TextDefaults | None = None


class _File(Struct, frozen=True):
    classes: dict[str, msgspec.Raw]


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the defaults of its class, and the text model's part of it, if there is one, at the top level.

    A field that `config` gives stays as it is, null as well. An outer field counts if neither the text model's part nor
    its class has it. The ids that end an output always count, as in Transformers.
    """
    table = _read_table()
    defaults = _defaults_of(config, table)
    text = config.get("text_config")
    if defaults.text is None and not isinstance(text, dict):
        return _fill(config, defaults)
    outer = {name: value for name, value in config.items() if name != "text_config"}
    if not isinstance(text, dict):  # older checkpoints of some types have the text model's fields outside
        text = {name: value for name, value in outer.items() if name not in _OUTER}
        text = {**(defaults.text.fields if defaults.text else {}), **text}
    inner = _inner_defaults(text, defaults.text, table)
    outside = {**defaults.fields, **outer}
    shared = {name: outside[name] for name in _SHARED if name in outside and name not in text}
    kept = {name: outer[name] for name in (*_OUTER, _ENDS) if outer.get(name) not in (None, [], "")}
    kept |= {name: True for name in _SHARED if outside.get(name)}  # the files decide, where the two differ
    return {**outer, **_fill(text, inner), **shared, **kept}


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` of a model that speaks as well: that of the part that writes text (`thinker_config`)."""
    inner = config.get("thinker_config")
    if not isinstance(inner, dict):
        return dict(config)
    model_type = inner.get("model_type") or f"{config.get('model_type')}_thinker"
    known = _defaults_of({"model_type": model_type}, _read_table()).architectures
    kept = {name: config[name] for name in _WHOLE if name in config}
    return {**kept, **inner, "model_type": model_type, "architectures": known or inner.get("architectures")}


def without_retrieval(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` of a model that makes vectors of what another one reads: that of the other (`vlm_config`)."""
    inner = config.get("vlm_config")
    if not isinstance(inner, dict):
        return dict(config)
    kept = {name: config[name] for name in ("architectures", *_WHOLE) if name in config}
    return {**inner, **kept}


def stated_fields(config: Mapping[str, Any]) -> set[str]:
    """Names of the fields of `complete` that `config` gives itself."""
    text = config.get("text_config")
    return {*config, *(text if isinstance(text, dict) else ())}


def _fill(config: Mapping[str, Any], defaults: ConfigDefaults) -> dict[str, Any]:
    config = unite(config)
    renamed = {own: config[name] for name, own in defaults.aliases.items() if name in config}
    filled = {**defaults.fields, **config, **renamed}
    rope = defaults.fields.get("rope_parameters")
    if rope and not config.get("rope_parameters"):  # rope_scaling says the same, and a class's defaults stand together
        filled["rope_parameters"] = None if config.get("rope_scaling") else rope
    return filled


def _inner_defaults(
    text: Mapping[str, Any], place: TextDefaults | None, table: Mapping[str, msgspec.Raw]
) -> ConfigDefaults:
    if place is not None and (place.is_fixed or not text.get("model_type")):
        text = {**text, "model_type": place.type}
    return _defaults_of(text, table)


def _defaults_of(config: Mapping[str, Any], table: Mapping[str, msgspec.Raw]) -> ConfigDefaults:
    """The defaults of a model type, or else of the class that config.json names; none if Transformers has neither."""
    raw = table.get(str(config.get("model_type")))
    if raw is not None:
        return msgspec.json.decode(raw, type=ConfigDefaults)
    names = config.get("architectures")
    entries = (msgspec.json.decode(entry, type=ConfigDefaults) for entry in table.values())
    found = (entry for entry in entries if isinstance(names, list) and names and names[0] in entry.architectures)
    return next(found, ConfigDefaults())


def _read_table() -> dict[str, msgspec.Raw]:
    """The lines of the table by model type, encoded: few of them are ever needed."""
    return msgspec.json.decode(_PATH.read_bytes(), type=_File).classes
