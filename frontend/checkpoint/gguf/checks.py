"""Checks a header as a whole, before a configuration and a tokenizer are made of it."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Fields


class _Kind(NamedTuple):
    """Values of the metadata whose names match `names`."""

    names: re.Pattern[str]
    what: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_flag(value: Any) -> bool:
    return type(value) in (bool, int)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)


def _is_real(value: Any) -> bool:
    """llama.cpp takes no whole number here, so that none is read from the bytes of a fraction."""
    return type(value) is float and 0 <= value < math.inf


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _by_layer(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One value, or a list of those of all layers."""
    return lambda value: fits(value) or _list_of(fits)(value)


def _kinds(*rows: tuple[str, str, Callable[[Any], bool]]) -> tuple[_Kind, ...]:
    return tuple(_Kind(re.compile(names), what, fits) for names, what, fits in rows)


_SIZES = r".*(length|count|size|rank|dim|kernel)(_swa|_mla)?"
"""Of numbers that are not more than the longest dimension of the tensors."""
_OF_MODEL = _kinds(
    (r"rope\.scaling\.type", "a text", _is_text),
    (
        r"rope\.freq_base(_swa)?|(logit_|embedding_|residual_|expert_weights_|attention\.)scale",
        "a fraction above 0",
        lambda value: _is_real(value) and value > 0,
    ),
    (r"expert_weights_norm|use_parallel_residual|ssm\.dt_b_c_rms|rope\.scaling\.finetuned", "a flag", _is_flag),
    (r"attention\.sliding_window_pattern", "a flag for each layer", _by_layer(_is_flag)),
    (r"activation_sparsity_scale", "a list of numbers", _list_of(_is_number)),
    (r".+_epsilon", "a fraction between 0 and 1", lambda value: _is_real(value) and 0 < value < 1),
    (
        r"rope\.scale_linear|.+([._]scale|_softcapping|_clamp_kqv|factor|_multiplier|_beta_fast|_beta_slow)",
        "a fraction of at least 0",
        _is_real,
    ),
    (
        r"(embedding|context)_length|block_count|interleave_moe_layer_step",
        "a whole number above 0",
        lambda value: _is_whole(value) and value > 0,
    ),
    (r"attention\.head_count(_kv)?|feed_forward_length", "a whole number", _by_layer(_is_whole)),
    (
        r".*(context_length|temperature_length|chunk_size|sliding_window|top_k|vocab_size)"
        r"|.*(step|func|l_cache|num_inputs|active_idx|layers)",
        "a whole number",
        _is_whole,
    ),
    (_SIZES, "a whole number", _is_whole),
)
"""By names without the architecture; the first that matches counts."""
_OF_OTHERS = _kinds(
    (r"general\.architecture|tokenizer\.ggml\.(model|pre)|tokenizer\.chat_template(\..+)?", "a text", _is_text),
    (r"general\.sampling\.(temp|top_p|top_k|min_p|penalty_repeat)", "a number", _is_number),
    (r"tokenizer\.ggml\.(tokens|merges)", "a list of texts", _list_of(_is_text)),
    (r"tokenizer\.ggml\.token_type", "a list of types", _list_of(lambda kind: type(kind) is int and 0 <= kind <= 6)),
    (r"tokenizer\.ggml\.scores|xielu\..+", "a list of numbers", _list_of(_is_number)),
    (r"tokenizer\.ggml\.add_\w+", "a flag", _is_flag),
    (r"tokenizer\.ggml\.\w+_token_id", "a token's id", lambda value: type(value) is int),
)
_OF_LAYERS = ("attention.sliding_window_pattern", "attention.head_count", "attention.head_count_kv",
              "feed_forward_length", "activation_sparsity_scale")  # fmt: skip
"""Values of which a list has one for each layer."""
_NO_ID = (-1, (1 << 32) - 1)
"""Ids of tokens that there are not."""
_IDS = re.compile(r"tokenizer\.ggml\.(bos|eos|eot|eom)_token_id")
"""Without those of padding and unknown texts, which sound files may have beyond the tokens."""
_LAYER = re.compile(r"blk\.(\d+)\.")
_ENDING = re.compile(r"\.(weight|bias|scale|input_scale)$")


def check_values(path: str, metadata: Mapping[str, Any], longest: int) -> None:
    """That values have the types and ranges that their names ask for; `longest` is the tensors' longest dimension.

    Raises:
        ConfigError: one does not; the message names it.
    """
    prefix = f"{metadata['general.architecture']}."
    tokens, num_layers = metadata.get("tokenizer.ggml.tokens"), metadata.get(f"{prefix}block_count")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    for key, value in metadata.items():
        name, kinds = key.removeprefix(prefix), _OF_MODEL if key.startswith(prefix) else _OF_OTHERS
        kind = next((kind for kind in kinds if kind.names.fullmatch(name)), None)
        fault = None
        if kind is not None and not kind.fits(value):
            fault = f"not {kind.what}"
        elif kind is not None and kind.names.pattern == _SIZES and value > longest:
            fault = f"more than the {longest} of the longest tensor"
        elif _IDS.fullmatch(key) and num_tokens and value not in _NO_ID and not 0 <= value < num_tokens:
            fault = f"where there are {num_tokens} tokens"
        elif name in _OF_LAYERS and isinstance(value, list) and len(value) != num_layers:
            fault = f"and not one value for each of {num_layers} layers"
        if fault is not None:
            raise ConfigError(f"{path} is damaged: {key} is {repr(value)[:60]}, {fault}. Download it again.")


def check_tensors(fields: Fields, num_tokens: int) -> None:
    """That tensors have known names, layers and sizes are those of the metadata, and each token has a row.

    Raises:
        ConfigError: they do not; the message names the field or the tensor.
    """
    _check_names(fields)
    found = 1 + max((int(match[1]) for name in fields.tensors if (match := _LAYER.match(name))), default=-1)
    stated = fields.need("block_count")
    if not 0 < stated - fields.get("nextn_predict_layers", 0) <= found <= stated:
        raise ConfigError(
            f"{fields.path} is damaged: {fields.architecture}.block_count is {stated} (nextn_predict_layers are "
            f"{fields.get('nextn_predict_layers', 0)}), and its tensors are those of {found} layers. Download it again."
        )
    used, experts = fields.get("expert_used_count", 0), fields.get("expert_count", 0)
    if experts and not 0 < used <= experts:  # some files without experts say how many are used
        raise ConfigError(
            f"{fields.path} is damaged: {fields.architecture}.expert_used_count is {used}, and expert_count {experts}. "
            "Download it again."
        )
    num_rows, width = fields.tensors["token_embd.weight"].shape
    if width != fields.need("embedding_length"):
        raise ConfigError(
            f"{fields.path} is damaged: {fields.architecture}.embedding_length is "
            f"{fields.need('embedding_length')}, and token_embd.weight has rows of {width}. Download it again."
        )
    if num_tokens > num_rows:
        raise ConfigError(
            f"{fields.path} is damaged: tokenizer.ggml.tokens has {num_tokens} tokens, and token_embd.weight "
            f"{num_rows} rows. Download it again."
        )


def _check_names(fields: Fields) -> None:
    import gguf  # imported here: 0.2 s, for these files only

    known = set(gguf.TENSOR_NAMES.values())
    for name in fields.tensors:
        stem = _LAYER.sub("blk.{bid}.", name)
        if stem not in known and _ENDING.sub("", stem) not in known:
            raise ConfigError(
                f"{fields.path} holds a tensor {name!r}, which no model has. Download it again if it is damaged; if it "
                "is new, pip install -U gguf."
            )
