"""Writes the defaults of Transformers' configuration classes, which the reading of config.json fills in.

These are the classes of models that generate text, of the text models inside, and of encoders of text.

    .venv/bin/python -m scripts.config_defaults    # writes frontend/checkpoint/config_defaults.json

Each model type has a line of the file. Run it again with a newer Transformers; a test compares the two.
"""

import dataclasses
import fnmatch
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from quire.frontend.checkpoint.encoders import ENCODER_TYPES

PATH = Path(__file__).parent.parent / "frontend" / "checkpoint" / "config_defaults.json"

UNREAD = (
    "*_token_id", "*_token_ids", "*_token_index", "*dropout*", "*_drop", "*_pdrop", "*drop_path*", "*_std",
    "initializer_*", "init_*", "*_init_*", "*loss*", "mask_time_*", "mask_feature_*", "use_cache",
    "output_router_logits", "pretraining_tp", "summary_*", "problem_type", "num_labels",
)  # fmt: skip
"""Fields that tell nothing of what a model computes with trained weights. Tokens that begin or end a text are those of
the tokenizer and of generation_config.json."""

_GENERATING = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
"""Model types that generate text, with their classes."""
_SIDES = frozenset({"t5gemma2_decoder"})
"""Types of one side of a model with an encoder and a decoder."""
_OUTER = ("tie_word_embeddings",)
"""Fields that a model with a text model inside reads outside of it."""
_ROTARY = {
    "rope_theta": (
        "rope_theta", "rotary_emb_base", "rope_local_base_freq", "swa_rope_theta", "local_rope_theta",
        "global_rope_theta", "compress_rope_theta",
    ),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}  # fmt: skip
"""Of what rotary embeddings are told: the names that checkpoints have for it beside `rope_parameters`."""
_SIZES = {"qk_rope_head_dim": 6, "rotary_dim": 6}
"""Fields from which a class may compute such numbers, which are no defaults then."""
_PROBE = 0.125


def table() -> dict[str, dict[str, Any]]:
    """By model type: `fields` with their defaults, `aliases` of other names, and `text`, the model inside if any.

    `architectures` has the classes that a type is known by where config.json names none.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    entries: dict[str, dict[str, Any]] = {}
    known = {name for mapping in _GENERATING for name in mapping} | ENCODER_TYPES | _SIDES
    left = sorted(known & {*CONFIG_MAPPING})
    while left:
        name = left.pop()
        entries[name] = _entry(CONFIG_MAPPING[name])
        inner = entries[name].get("text", {}).get("type", name)
        left += {inner} - {*entries, *left}
    entries = {name: entry for name, entry in entries.items() if entry}
    named: dict[str, str] = {}
    for name, architecture in _architectures():
        if name in entries and ("text" not in entries[name] or named.get(architecture, name) == name):
            named[architecture] = name
    for architecture, name in named.items():
        entries[name].setdefault("architectures", []).append(architecture)
    return dict(sorted(entries.items()))


def text_of(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The file: the library's version, and a line for each of `entries`."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in entries.items()]
    return f'{{"transformers": "{transformers.__version__}", "classes": {{\n' + ",\n".join(lines) + "\n}}\n"


def _entry(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """A class as an entry of the table; empty if there is no language model in it."""
    text = kind.sub_configs_defaults.get("text_config")
    if text is not None:
        fields = {name: value for name, value in _stated(kind) if name in _OUTER}
        return _without_empty({"fields": fields, "text": _inner(text)})
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    if not names & {"vocab_size", "n_vocab"}:
        return {}
    aliases = {name: other for name, other in kind.attribute_map.items() if not _is_unread(name)}
    fields = {**_dense_layers(kind), **dict(_stated(kind)), **_rotary(kind)}
    return _without_empty({"fields": fields, "aliases": aliases})


def _inner(text: Any) -> dict[str, Any]:
    """How the class takes the configuration of its text model.

    `type` is the model type of that configuration if it names none, or whatever it names (`is_fixed`); `fields` are
    defaults that count where there is no such configuration at all.
    """
    is_fixed = issubclass(text.config_class, PretrainedConfig)
    fields = {name: value for name, value in text.init_kwargs.items() if _is_read(name, value) and name != "model_type"}
    return _without_empty({"type": text.model_type, "is_fixed": is_fixed, "fields": fields})


def _stated(kind: type[PretrainedConfig]) -> Iterator[tuple[str, Any]]:
    """The fields that a class adds to those of all classes, with their defaults, as JSON has them."""
    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    for field in dataclasses.fields(kind):
        value = field.default_factory() if callable(field.default_factory) else field.default
        is_own = field.name not in {*common, *kind.sub_configs_defaults} and value is not dataclasses.MISSING
        if is_own and _is_read(field.name, value):
            yield (
                kind.attribute_map.get(field.name, field.name),
                json.loads(json.dumps(PretrainedConfig._encode_special_floats(value))),
            )


def _is_read(name: str, value: Any) -> bool:
    return value is not None and not _is_unread(name)


def _is_unread(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in UNREAD)


def _dense_layers(kind: type[PretrainedConfig]) -> dict[str, int]:
    """How many layers come before those with experts, where a class makes a list of that."""
    types = _value(kind, "mlp_layer_types") or []
    count = types.count("dense")
    return {"first_k_dense_replace": count} if types[count:] and set(types[count:]) == {"sparse"} else {}


def _rotary(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """The parameters of a class's rotary embeddings, under the names that checkpoints have for them.

    Parameters without such a name stay in `rope_parameters`.
    """
    rest = dict(_leaves(_rope_parameters(kind)))
    if not rest:
        return {}
    for name, size in _SIZES.items():
        sized = dict(_leaves(_rope_parameters(kind, **{name: size})))
        rest = {path: value for path, value in rest.items() if sized.get(path, value) == value}
    fields: dict[str, Any] = {}
    for leaf, names in _ROTARY.items():
        for name in names:
            probed = dict(_leaves(_rope_parameters(kind, **{name: _PROBE})))
            told = [path for path in rest if path[-1] == leaf and probed.get(path) == _PROBE]
            fields.update((name, rest.pop(path)) for path in told)
        if (leaf,) in rest:
            fields[leaf] = rest.pop((leaf,))
    is_plain = all(path[-1] == "rope_type" and value == "default" for path, value in rest.items())
    return fields if is_plain else {**fields, "rope_parameters": _tree(rest)}


def _rope_parameters(kind: type[PretrainedConfig], **settings: Any) -> dict[str, Any]:
    return _value(kind, "rope_parameters", **settings) or {}


def _value(kind: type[PretrainedConfig], name: str, **settings: Any) -> Any:
    """The value of a field in a config made from `settings` alone, if there is one."""
    try:
        return getattr(kind(**settings), name, None)
    except Exception:  # a class may refuse its own defaults
        return None


def _leaves(values: Mapping[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, *path, name)
        else:
            yield (*path, name), value


def _tree(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Rebuilds the tree that `_leaves` flattened."""
    tree: dict[str, Any] = {}
    for (*path, name), value in leaves.items():
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[name] = value
    return tree


def _architectures() -> Iterator[tuple[str, str]]:
    """Model types with the classes that are named after them: the other classes of a type are another type's."""
    for mapping in _GENERATING:
        for name, classes in mapping.items():
            for architecture in (classes,) if isinstance(classes, str) else classes:
                if _letters(architecture).startswith(_letters(name.removesuffix("_text"))):
                    yield name, architecture


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _without_empty(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if value not in ({}, False)}


if __name__ == "__main__":
    PATH.write_text(text_of(table()), encoding="utf-8")
