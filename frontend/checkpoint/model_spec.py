"""Reads a checkpoint's configuration: config.json or params.json, generation_config.json, the tokenizer's EOS token.

The files are JSON. They are read once, without torch or Transformers.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core import checkpoint_file
from quire.core.config.load import BESIDE_WEIGHTS
from quire.core.config.model import ModelConfig
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ConfigError
from quire.core.wire import gguf_table
from quire.frontend.checkpoint import mistral_params
from quire.frontend.checkpoint.config_defaults import complete, stated_fields, text_part, without_retrieval
from quire.frontend.checkpoint.context_length import context_length
from quire.frontend.checkpoint.encoder_decoders import (
    DECODER_FIELDS,
    DecoderRules,
    is_encoder_decoder,
    read_decoder_rules,
    read_encoder_spec,
    with_decoder,
)
from quire.frontend.checkpoint.encoders import is_encoder
from quire.frontend.checkpoint.overrides import override
from quire.frontend.checkpoint.registered_models import find_model
from quire.frontend.checkpoint.sentence_files import read_sentence_model
from quire.frontend.checkpoint.speech_tokens import read_speech_tokens
from quire.frontend.checkpoint.two_encoders import read_two_encoders, with_text_type

# Our name, then the names that checkpoints use for it.
_FIELDS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "n_vocab"),
    "num_layers": (
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "n_layers",
        "decoder_layers",
        "num_decoder_layers",
        "num_blocks",
    ),
    "num_attention_heads": (
        *("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "decoder_attention_heads"),
        "num_decoder_attention_heads",
    ),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "dim"),
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"),
        *("max_target_positions", "n_ctx", "model_max_length"),
    ),
}
_MOST = {
    **dict.fromkeys(_FIELDS["num_layers"], 2**14),
    **dict.fromkeys(_FIELDS["vocab_size"], 2**26),
    **dict.fromkeys(_FIELDS["hidden_size"], 2**24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 2**40),
    **dict.fromkeys((*_FIELDS["num_attention_heads"], "num_key_value_heads", "head_dim", "type_vocab_size"), 2**20),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 2**20),
    **dict.fromkeys(("n_shared_experts", "num_nextn_predict_layers", "mtp_num_hidden_layers"), 2**14),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "state_size", "kv_lora_rank"), 2**26),
}
"""The largest values of fields, far above every model's: a damaged number is refused at once, and not after hours of
building layers or with all memory taken."""
_HEAD_DIM = ("head_dim", "d_kv")
_UNSTATED = 2048
"""Tokens of a sequence where positions are relative and config.json says nothing, as of BLOOM."""
_UNBOUNDED = 2**20
"""Tokens of a sequence where nothing in the model limits them."""
_DTYPES: dict[str, Literal["bfloat16", "float16", "float32"]] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
}
_SAMPLING_DEFAULTS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is missing, unreadable, or not a JSON object; the message names the file.
    """
    try:
        value = checkpoint_file.read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: is it a checkpoint's folder?") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Like `read_json`, but empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_model_spec(folder: Path, model: ModelConfig, tokenizer_folder: Path | None = None) -> ModelSpec:
    """The specification of the checkpoint in `folder`, with `--hf-overrides` applied.

    Args:
        tokenizer_folder: the tokenizer's folder, if not `folder`; its EOS token ends generation, too.

    Raises:
        ConfigError: config.json is missing, invalid, or lacks a field that every language model needs.
    """
    path, own = _read_config(folder, model)
    stated = override(text_part(own), model.hf_overrides, list(_FIELDS.values()))
    try:
        return make_model_spec(stated, folder, model, path, tokenizer_folder or folder)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} and the files beside it describe no model ({error!r}). Download it again, or correct it with "
            "--hf-overrides."
        ) from error


def make_model_spec(
    stated: dict[str, Any], folder: Path, model: ModelConfig, path: Path, tokenizer_folder: Path
) -> ModelSpec:
    """`read_model_spec` of a checkpoint whose config.json, with overrides, is `stated`; messages call it `path`."""
    two = read_two_encoders(stated)
    config = complete(with_decoder(without_retrieval(with_text_type(stated))))
    if not isinstance(config.get("model_type"), str | None):
        raise ConfigError(f"{path}: model_type must be a string, got {config['model_type']!r}.")
    defaults = {"max_position_embeddings": _UNSTATED}
    if _has_only_states(config):
        defaults = {"max_position_embeddings": _UNBOUNDED, "num_attention_heads": 1}
    architecture = _architecture(config, path)
    has_encoder = is_encoder_decoder(config, architecture)
    encodes = two is not None or (not has_encoder and is_encoder(config, architecture))
    if encodes:  # there may be another layer in the place of attention
        defaults["num_attention_heads"] = 1
    given = stated_fields(without_retrieval(stated))
    names = {name: sorted(keys, key=lambda key: key not in given) for name, keys in _FIELDS.items()}
    if has_encoder:
        names = {name: [*DECODER_FIELDS.get(name, ()), *keys] for name, keys in names.items()}
    layers = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    blocks = config.get("block_sizes")
    if isinstance(layers, (list, str)) and names["num_layers"][0] not in given:
        config["num_hidden_layers"] = len(layers)
    elif isinstance(blocks, list) and all(isinstance(each, int) for each in blocks):
        config["num_hidden_layers"] = sum(blocks)
    _check_sizes(config, path)
    facts = {name: _positive_int(config, keys, path, defaults.get(name)) for name, keys in names.items()}
    heads = facts["num_attention_heads"]
    kv_heads = _positive_int(config, ("num_key_value_heads",), path, default=heads)
    stated_names = with_decoder(stated).keys()
    if has_encoder and "encoder_attention_heads" in stated_names and "num_key_value_heads" not in stated_names:
        kv_heads = heads  # a class may read that number of the encoder
    if heads % kv_heads and "num_key_value_heads" not in given:
        kv_heads = heads  # a class has a number for them where its attention has latents in their place
    if heads % kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})."
        )
    if all(config.get(name) is None for name in _HEAD_DIM) and facts["hidden_size"] % heads:
        raise ConfigError(f"{path}: hidden_size ({facts['hidden_size']}) is not a multiple of the {heads} heads.")
    if config.get("head_dim") == 0:  # of a class whose heads have no part with positions
        config["head_dim"] = None
    facts["max_position_embeddings"] = context_length(config, facts["max_position_embeddings"], path)
    head_dim = _positive_int(config, _HEAD_DIM, path, default=facts["hidden_size"] // heads)
    if two is not None:
        facts["hidden_size"] = _positive_int({"projection_dim": two.size}, ("projection_dim",), path)
    return ModelSpec(
        path=str(folder),
        tokenizer_path=str(tokenizer_folder),
        name=model.model or folder.name,
        architecture=architecture,
        hf_config=config,
        config_json=stated,
        dtype=_dtype(config, model, folder, path),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        embeds_images=two is not None,
        is_encoder=encodes,
        encoder=read_encoder_spec(config, facts["max_position_embeddings"], facts["vocab_size"])
        if has_encoder
        else None,
        num_token_types=_positive_int(config, ("type_vocab_size",), path) if config.get("type_vocab_size") else 1,
        eos_token_ids=_eos_token_ids(config, model, folder, tokenizer_folder),
        implementation="quire" if model.model_impl == "vllm" else model.model_impl,
        trust_remote_code=model.trust_remote_code,
        model_class=find_model(architecture),
        sentence=read_sentence_model(folder),
        drafts_by=None,
        **facts,
    )


def read_default_sampling(folder: Path, model: ModelConfig) -> dict[str, Any]:
    """The checkpoint's defaults for sampling parameters, as `SamplingParams` keywords.

    They come from generation_config.json, of the folder that `--generation-config` names if any, and from
    `--override-generation-config`, which takes precedence.

    Raises:
        ConfigError: a file is missing or malformed, or an override is not a sampling parameter.
    """
    for name in model.override_generation_config:
        if name not in (*_SAMPLING_DEFAULTS, "max_new_tokens"):
            raise ConfigError(
                f"--override-generation-config holds {name!r}; it may hold {', '.join(_SAMPLING_DEFAULTS)} and "
                "max_new_tokens."
            )
    config = {**_generation_config(folder, model), **model.override_generation_config}
    defaults = {name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    return defaults


def read_rules_of_decoder(folder: Path, model: ModelConfig) -> DecoderRules | None:
    """What a decoder that attends to an encoder begins and ends with; None for a model without an encoder.

    With `--generation-config vllm`, generation_config.json counts for the first token alone.

    Raises:
        ConfigError: a file is missing or malformed, or nothing says what the decoder begins with.
    """
    path = folder / "config.json"
    config = override(read_json_if_present(path), model.hf_overrides, list(_FIELDS.values()))
    if not config or not is_encoder_decoder(config, _architecture(config, path)):
        return None
    if model.generation_config != "vllm":
        return _rules(config, _generation_config(folder, model), folder, model)
    rules = _rules(config, read_json_if_present(folder / "generation_config.json"), folder, model)
    return DecoderRules(decoder_start_token_id=rules.decoder_start_token_id, speech=rules.speech)


def _rules(config: dict[str, Any], generation: dict[str, Any], folder: Path, model: ModelConfig) -> DecoderRules:
    rules = read_decoder_rules(config, generation, folder / "config.json")
    encoder = read_encoder_spec(complete(config), 1, 1)
    if not encoder.reads_features or encoder.reads_images:
        return rules
    ends = _eos_token_ids(config, model, folder, folder)
    speech = read_speech_tokens(generation or config, rules.decoder_start_token_id, ends, folder)
    has_heads = all(_has_head(complete(config), *each) for each in speech.alignment_heads)
    if not has_heads:  # a distilled model may have those of its teacher
        speech = msgspec.structs.replace(speech, alignment_heads=[])
    return msgspec.structs.replace(rules, speech=speech)


def _has_head(config: dict[str, Any], layer: int, head: int) -> bool:
    """True if a decoder has a layer and a head of these numbers."""
    layers, heads = config.get("decoder_layers"), config.get("decoder_attention_heads")
    return isinstance(layers, int) and isinstance(heads, int) and 0 <= layer < layers and 0 <= head < heads


def read_output_limit(folder: Path, model: ModelConfig) -> int | None:
    """Most output tokens of any request to a server; None for no limit.

    The limit is `max_new_tokens` of `--override-generation-config`, or else of the folder that `--generation-config`
    names. The checkpoint itself sets no limit.
    """
    config = {} if model.generation_config == "auto" else _generation_config(folder, model)
    return {**config, **model.override_generation_config}.get("max_new_tokens")


def _generation_config(folder: Path, model: ModelConfig) -> dict[str, Any]:
    match model.generation_config:
        case "vllm":
            return {}
        case "auto":
            return read_json_if_present(folder / "generation_config.json")
        case other:
            return read_json(Path(other).expanduser() / "generation_config.json")


# ------------------------------------------------------------------------------------------------------ config.json


def _read_config(folder: Path, model: ModelConfig) -> tuple[Path, dict[str, Any]]:
    """(the file of the configuration, its content in the form of config.json)."""
    path, params = folder / "config.json", folder / mistral_params.FILE_NAME
    if (adapter := folder / "adapter_config.json").is_file() and not path.is_file() and not params.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        raise ConfigError(
            f"{folder} has an adapter of {base!r}, and no model. Merge it into that model, and serve the result."
        )
    is_mistral = model.config_format == "mistral" or (
        model.config_format == "auto" and params.is_file() and not path.is_file()
    )
    if is_mistral:
        return params, mistral_params.as_hub_config(read_json(params), params)
    config, table = read_json(path), folder / gguf_table.FILE_NAME
    if table.is_file():  # config.json was made from the metadata of a file, which messages name
        path = next(map(Path, gguf_table.read_gguf_table(table).files), path)
    return path, config


def _has_only_states(config: dict[str, Any]) -> bool:
    """Returns True if the model keeps states (Mamba, RWKV, xLSTM) and has no attention: its tokens have no
    positions."""
    fields = ("state_size", "rescale_every", "inference_state_dtype")
    has_states = any(config.get(name) is not None for name in fields)
    return has_states and config.get("num_attention_heads") is None


def _architecture(config: dict[str, Any], path: Path) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f'{path} names no architecture; add one with --hf-overrides \'{{"architectures": ["LlamaForCausalLM"]}}\'.'
        )
    return names[0]


def _positive_int(config: dict[str, Any], keys: Sequence[str], path: Path, default: int | None = None) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if value is None:
        raise ConfigError(f"{path} has no {keys[0]}: it does not describe a language model.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {keys[0]} must be a positive whole number, got {value!r}.")
    return value


def _check_sizes(config: dict[str, Any], path: Path) -> None:
    for name, most in _MOST.items():
        value = config.get(name)
        if isinstance(value, int) and value > most:
            raise ConfigError(
                f"{path}: {name} is {value}; models have at most {most}. Download it again, or correct it with "
                "--hf-overrides."
            )


def _dtype(
    config: dict[str, Any], model: ModelConfig, folder: Path, path: Path
) -> Literal["bfloat16", "float16", "float32"]:
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    stated = config.get("dtype") or config.get("torch_dtype") or _stored_dtype(folder) or "float32"
    name = str(stated).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"{path}: cannot compute in dtype {stated!r}; choose one with --dtype, such as bfloat16.")
    return _DTYPES[name]


def _stored_dtype(folder: Path) -> str | None:
    """The dtype of the first floating-point tensor in the weight files, from their headers (a length, then JSON)."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith(BESIDE_WEIGHTS):
            continue
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= 100 * 1024**2:
                return None  # corrupt; loading the weights reports it in detail
            try:
                header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
            except (ValueError, msgspec.DecodeError, RecursionError):
                return None
        for name, tensor in header.items():
            if name != "__metadata__" and tensor.get("dtype") in _DTYPES:
                return tensor["dtype"]
    return None


# --------------------------------------------------------------------------------------------------------------- EOS


class _AddedToken(Struct):
    id: int
    content: str


class _TokenizerJson(Struct):
    """The part of tokenizer.json that is read here; msgspec skips the vocabulary without building it."""

    added_tokens: list[_AddedToken] = []


def _eos_token_ids(config: dict[str, Any], model: ModelConfig, folder: Path, tokenizer_folder: Path) -> list[int]:
    """All ids that end an output, from generation_config.json, config.json and the tokenizer."""
    found: list[int] = []
    for name, source in (("generation_config.json", _generation_config(folder, model)), ("config.json", config)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if any(type(token_id) is not int for token_id in ids):
            raise ConfigError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}.")
        found += ids
    from_tokenizer = _tokenizer_eos(tokenizer_folder)
    if from_tokenizer is not None:
        found.append(from_tokenizer)
    return sorted(set(found))


def _tokenizer_eos(folder: Path) -> int | None:
    """Id of the tokenizer's EOS token; None if there is no tokenizer, or it has no EOS token."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json_if_present(folder / name).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content:
            break
    else:
        return None
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _added_tokens(folder).get(content)
    tokenizer = checkpoint_file.read_struct(path, _TokenizerJson)
    return next((token.id for token in tokenizer.added_tokens if token.content == content), None)


def _added_tokens(folder: Path) -> dict[str, int]:
    """Ids of the tokens that tokenizer_config.json or added_tokens.json adds, for tokenizers in older files."""
    listed = read_json_if_present(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    older = read_json_if_present(folder / "added_tokens.json")
    return {**older, **{entry["content"]: int(token_id) for token_id, entry in listed.items()}}
