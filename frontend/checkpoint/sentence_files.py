"""Reads the files that sentence-transformers puts beside a model: its modules, the pooling, dense layers, prompts."""

from pathlib import Path
from typing import Any, get_args

from quire.core import checkpoint_file
from quire.core.config.pooling import DenseLayer, SentenceKind, SentenceModel, SequencePooling
from quire.core.errors import ConfigError

_TOKENIZED = (
    *("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"),
    *("sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json"),
    "sentence_xlnet_config.json",
)
"""Files that say how texts are cut and spelled, the usual one first."""

_POOLINGS: dict[str, SequencePooling] = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
_MODES: dict[str, SequencePooling] = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
}
_KINDS: dict[str, SentenceKind] = {"CrossEncoder": "scores"}
_NOT_OF_TEMPLATES = ("chat_template", "restore_suffix", "tokenize", "return_dict", "return_tensors")
"""Options beside the variables of a template: its name, and how sentence-transformers cuts and tokenizes."""

_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """What the files in a checkpoint's folder say; None if it has no modules.json.

    Raises:
        ConfigError: a file is damaged, or asks for a pooling that is not there.
    """
    path = folder / "modules.json"
    modules = _read(path)
    if isinstance(modules, dict):
        modules = modules.get("modules")
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{path} must list modules, each with its type and path.")
    own = _object(folder / "config_sentence_transformers.json")
    texts: dict[str, Any] = next((found for name in _TOKENIZED if (found := _object(folder / name))), {})
    dense, pooling, fault, normalizes, pools, includes_prompt = [], None, None, False, False, True
    score_tokens: list[int] = []
    for module in modules:
        place = checkpoint_file.check_inside(folder, module.get("path") or "", path) / "config.json"
        match str(module.get("type")).rpartition(".")[2]:
            case "Pooling":
                pools = True
                pooling, fault = _pooling(_object(place), place)
                includes_prompt = _object(place).get("include_prompt") is not False
            case "SpladePooling":
                pools = True
                pooling, fault = _splade(_object(place), place)
            case "Dense":
                dense.append(_dense(_object(place), str(module.get("path") or ""), place))
            case "Normalize":
                normalizes = True
            case "LogitScore":
                score_tokens = _score_tokens(_object(place), place)
    made: SentenceKind = "token vectors" if dense and not pools else "vectors"
    kind = _KINDS.get(str(own.get("model_type")), made)
    similarity = own.get("similarity_fn_name")
    template, variables = _pair_template(texts, folder) if kind == "scores" else (None, {})
    return SentenceModel(
        kind=kind,
        pooling=pooling,
        pooling_fault=fault,
        normalizes=normalizes,
        dense=dense,
        max_seq_length=_positive(texts.get("max_seq_length"), "max_seq_length"),
        do_lower_case=bool(texts.get("do_lower_case", False)),
        prompts=_prompts(own.get("prompts"), folder),
        default_prompt_name=own.get("default_prompt_name"),
        similarity=similarity if similarity in _SIMILARITIES else "cosine",
        includes_prompt=includes_prompt,
        pair_template=template,
        template_variables=variables,
        score_tokens=score_tokens,
        score_activation=own.get("activation_fn") if isinstance(own.get("activation_fn"), str) else None,
    )


def _read(path: Path) -> Any:
    try:
        return checkpoint_file.read_json(path)
    except FileNotFoundError:
        return None


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value or {}


def _pooling(config: dict[str, Any], path: Path) -> tuple[SequencePooling | None, str | None]:
    """(the pooling, or None; why there is none)."""
    chosen = [mode for mode, value in config.items() if mode.startswith("pooling_mode_") and value is True]
    if isinstance(name := config.get("pooling_mode"), str):
        chosen = [name]
    ways = [_MODES.get(mode) or _POOLINGS.get(mode) for mode in chosen]
    if len(ways) == 1 and ways[0] is not None:
        return ways[0], None
    return None, (
        f"{path} asks for {' and '.join(chosen) or 'no pooling'}; one of {', '.join(get_args(SequencePooling))} is "
        'there alone. Choose one with --pooler-config \'{"seq_pooling_type": "MEAN"}\'.'
    )


def _pair_template(texts: dict[str, Any], folder: Path) -> tuple[str | None, dict[str, Any]]:
    """(the name of the chat template that writes pairs, or None; its variables)."""
    modalities = texts.get("modality_config")
    if not isinstance(modalities, dict) or "message" not in modalities:
        return None, {}
    options = texts.get("processing_kwargs") or {}
    variables = options.get("chat_template") or {} if isinstance(options, dict) else None
    name = variables.get("chat_template") or "default" if isinstance(variables, dict) else None
    if not isinstance(variables, dict) or not isinstance(name, str):
        raise ConfigError(
            f"{folder}: processing_kwargs.chat_template in the files of sentence-transformers must be an object, whose "
            "chat_template is the name of a template."
        )
    return name, {key: value for key, value in variables.items() if key not in _NOT_OF_TEMPLATES}


def _splade(config: dict[str, Any], path: Path) -> tuple[SequencePooling | None, str | None]:
    """The same of weights for the vocabulary."""
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy in ("max", "sum") and activation == "relu":
        return "SPLADE_MAX" if strategy == "max" else "SPLADE_SUM", None
    return None, (
        f"{path} asks for {strategy} of {activation}; max and sum of relu are there alone. Choose one with "
        '--pooler-config \'{"seq_pooling_type": "SPLADE_MAX"}\'.'
    )


def _score_tokens(config: dict[str, Any], path: Path) -> list[int]:
    """The token whose logit is the score, behind the one whose logit is subtracted, if there is one."""
    found = [config.get(name) for name in ("false_token_id", "true_token_id")]
    tokens = [each for each in found if each is not None]
    if found[1] is None or not all(type(each) is int and each >= 0 for each in tokens):
        raise ConfigError(f"{path} must have true_token_id, and may have false_token_id: ids of tokens; got {config}.")
    return tokens


def _dense(config: dict[str, Any], folder: str, path: Path) -> DenseLayer:
    sizes = {name: _positive(config.get(name), name) for name in ("in_features", "out_features")}
    if None in sizes.values():
        raise ConfigError(f"{path} must have in_features and out_features.")
    activation = config.get("activation_function") or "torch.nn.modules.activation.Tanh"
    return DenseLayer(folder=folder, bias=bool(config.get("bias", True)), activation=activation, **sizes)  # type: ignore[arg-type]


def _positive(value: Any, name: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(
            f"{name} in the files of sentence-transformers must be a positive whole number, got {value!r}."
        )
    return value


def _prompts(prompts: Any, folder: Path) -> dict[str, str]:
    if prompts is None:
        return {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: prompts must be texts by name.")
    return prompts
