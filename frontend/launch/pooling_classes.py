"""Resolves how a model makes scores, or probabilities of classes."""

from pathlib import Path
from typing import Any

from quire.core.config.pooling import PoolerConfig, TokenScores
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.token_lookup import find_token_ids
from quire.frontend.launch.pooling_kinds import Kind, kind_of

_STEP_TAG = "<extra_0>"
"""The token behind each step of a solution, where the checkpoint says nothing."""
_IDENTITY = "torch.nn.modules.linear.Identity"
_BY_PROBLEM = {
    "regression": _IDENTITY,
    "single_label_classification": "auto",
    "multi_label_classification": "torch.nn.modules.activation.Sigmoid",
}


def classification(spec: ModelSpec, asked: PoolerConfig) -> dict[str, Any]:
    """The fields of a `PoolingSpec` of a model that makes scores or probabilities of classes."""
    if asked.dimensions is not None or asked.enable_chunked_processing:
        name = "dimensions" if asked.dimensions is not None else "enable_chunked_processing"
        raise ConfigError(f"--pooler-config: {name} is for vectors; use --convert embed.")
    config, tokenizer_folder = spec.config_json, Path(spec.tokenizer_path)
    kind, sentence = kind_of(spec), spec.sentence
    steps = asked.token == "STEP" or (asked.token is None and kind.has_steps)
    tag, scores = asked.step_tag_id, _token_scores(spec, asked, tokenizer_folder)
    if steps and tag is None and scores is None:
        [tag] = find_token_ids(tokenizer_folder, [_STEP_TAG])
    return {
        "token": "STEP" if steps else "ALL",
        "use_activation": kind.activates if asked.use_activation is None else asked.use_activation,
        "classes": _classes(config, kind, scores, asked),
        "score_activation": _score_activation(config, None if sentence is None else sentence.score_activation),
        "token_scores": scores,
        "joins_texts": _joins_texts(config, scores),
        "embedding_size": spec.hidden_size,
        "logit_mean": asked.logit_mean,
        "logit_sigma": asked.logit_sigma,
        "step_tag_id": tag,
        "returned_token_ids": asked.returned_token_ids,
    }


def _token_scores(spec: ModelSpec, asked: PoolerConfig, tokenizer_folder: Path) -> TokenScores | None:
    config = spec.config_json
    tokens = config.get("classifier_from_token")
    if asked.returned_token_ids is not None:
        return TokenScores(token_ids=asked.returned_token_ids)
    if tokens is None:
        own = [] if spec.sentence is None else spec.sentence.score_tokens
        return TokenScores(token_ids=own, as_difference=len(own) == 2) if own else None
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f'classifier_from_token must list tokens, such as ["no", "yes"]; got {tokens!r}.')
    method = _method(config)
    if method not in (None, "from_2_way_softmax", "no_post_processing"):
        raise ConfigError(f"method must be from_2_way_softmax or no_post_processing, got {method!r}.")
    as_difference = method == "from_2_way_softmax"
    if as_difference and len(tokens) != 2:
        raise ConfigError(f"from_2_way_softmax takes two tokens in classifier_from_token, got {len(tokens)}.")
    return TokenScores(token_ids=find_token_ids(tokenizer_folder, tokens), as_difference=as_difference)


def _method(config: dict[str, Any]) -> Any:
    """The way from the logits of tokens to scores, if config.json names one."""
    if config.get("method") is None and config.get("is_original_qwen3_reranker"):
        return "from_2_way_softmax"
    return config.get("method")


def _joins_texts(config: dict[str, Any], scores: TokenScores | None) -> bool:
    """True if a pair is one text, as language models read it whose tokens are the classes."""
    separates = config.get("use_sep_token")
    return scores is not None and _method(config) is not None if separates is None else not separates


def _classes(config: dict[str, Any], kind: Kind, scores: TokenScores | None, asked: PoolerConfig) -> list[str]:
    if scores is not None:
        if scores.as_difference or (asked.returned_token_ids is None and "classifier_from_token" not in config):
            return ["LABEL_0"]
        return [str(name) for name in asked.returned_token_ids or config["classifier_from_token"]]
    names, count = config.get("id2label"), config.get("num_labels")
    if isinstance(names, dict) and names:
        return [str(names[key]) for key in sorted(names, key=int)]
    return [f"LABEL_{index}" for index in range(kind.num_classes if count is None else count)]


def _score_activation(config: dict[str, Any], saved: str | None) -> str:
    """The class of torch.nn.modules that makes probabilities of logits, or "auto".

    Args:
        saved: what the files of sentence-transformers say.
    """
    problem = config.get("problem_type")
    if problem in _BY_PROBLEM:
        return _BY_PROBLEM[problem]
    own = config.get("sentence_transformers")
    name = saved or (own.get("activation_fn") if isinstance(own, dict) else None)
    name = name or config.get("sbert_ce_default_activation_function") or "auto"
    if name != "auto" and not str(name).startswith("torch.nn.modules."):
        raise ConfigError(f"config.json names the activation {name!r}; only classes of torch.nn.modules are there.")
    return str(name)
