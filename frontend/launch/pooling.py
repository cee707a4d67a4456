"""Resolves what a model's output is, tokens or vectors, from the options and the checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from quire.core.config.model import ModelConfig
from quire.core.config.pooling import (
    Conversion,
    PoolerConfig,
    PoolingSpec,
    SequencePooling,
    TokenHead,
    TokenScores,
)
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ConfigError
from quire.core.wire.pooling import PoolingTask
from quire.frontend.checkpoint.token_lookup import find_token_ids


class _Kind(NamedTuple):
    """What a class of models makes.

    Attributes:
        output: "none" is tokens.
        by_token: an output for each token alone.
        has_steps: the outputs that count are those of the tokens behind each step.
        activates: logits become probabilities unless a request says otherwise.
        num_classes: where config.json does not say.
        scores_vocabulary: each token has a score of each token of the vocabulary.
    """

    output: Conversion
    by_token: bool = False
    has_steps: bool = False
    activates: bool = True
    num_classes: int = 2  # as in Transformers
    scores_vocabulary: bool = False


_KINDS: dict[str, _Kind] = {
    "ForCausalLM": _Kind("none"),
    "ForConditionalGeneration": _Kind("none"),
    "ChatModel": _Kind("none"),
    "LMHeadModel": _Kind("none"),
    "ForTextEncoding": _Kind("embed"),
    "EmbeddingModel": _Kind("embed"),
    "ForMaskedLM": _Kind("embed", scores_vocabulary=True),
    "ForSequenceClassification": _Kind("classify"),
    "ForTokenClassification": _Kind("classify", by_token=True),
    "ClassificationModel": _Kind("classify"),
    "ForProcessRewardModel": _Kind("classify", by_token=True, has_steps=True),
    "ForRewardModel": _Kind("classify", by_token=True, activates=False, num_classes=1),
    "ForRewardModeling": _Kind("classify", activates=False, num_classes=1),
    "RewardModel": _Kind("classify", by_token=True, activates=False, num_classes=1),
    "Model": _Kind("embed"),
}
"""By the ending of a class's name, as Transformers' auto classes have it; the first that fits counts."""

_EMBEDDING: list[PoolingTask] = ["embed", "token_embed"]
_CLASSIFYING: list[PoolingTask] = ["classify", "token_classify"]
_STEP_TAG = "<extra_0>"
"""The token behind each step of a solution, where the checkpoint says nothing."""

_TOKEN_HEADS: dict[PoolingTask, TokenHead] = {
    "token_embed": TokenHead(file="colbert_linear.pt", activation="normalize"),
    "token_classify": TokenHead(file="sparse_linear.pt", activation="torch.nn.modules.activation.ReLU", is_flat=True),
}
"""Heads of bge-m3 (arXiv:2402.03216), by the files beside the weights: a vector of each token, and its weight."""

_POOLING_FIELDS: dict[str, dict[str, SequencePooling]] = {
    "classifier_pooling": {"cls": "CLS", "mean": "MEAN"},
    "pooling": {"avg": "MEAN", "cls": "CLS", "last": "LAST"},
    "summary_type": {"first": "CLS", "last": "LAST", "mean": "MEAN"},
}
"""Fields of config.json that say how a text's vector is made, and their values."""

_IDENTITY = "torch.nn.modules.linear.Identity"
_BY_PROBLEM = {
    "regression": _IDENTITY,
    "single_label_classification": "auto",
    "multi_label_classification": "torch.nn.modules.activation.Sigmoid",
}


def resolve_pooling(model: ModelConfig, spec: ModelSpec) -> PoolingSpec | None:
    """How the model makes vectors, classes or scores; None for a model that generates.

    Raises:
        ConfigError: options that contradict each other or the checkpoint.
    """
    kind = _conversion(model, spec)
    if kind == "none":
        if model.pooler_config is not None and model.pooler_config != PoolerConfig():
            raise ConfigError(
                f"--pooler-config is for vectors, and {spec.name} generates text; add --runner pooling, or --convert "
                "embed or classify."
            )
        if model.io_processor_plugin is not None:
            raise ConfigError(
                f"--io-processor-plugin is for models whose output is vectors, and {spec.name} generates text; add "
                "--runner pooling."
            )
        return None
    asked = model.pooler_config or PoolerConfig()
    token_heads = _token_heads(spec) if kind == "embed" else {}
    tasks = _tasks(spec, kind, asked, [task for task in token_heads if task not in _EMBEDDING])
    sources = {"runner": "--runner" if model.runner == "pooling" else _source(model, spec)}
    common = _common(spec, asked, sources)
    common["io_processor_plugin"] = model.io_processor_plugin or spec.config_json.get("io_processor_plugin")
    if kind == "embed":
        is_sparse = common["sequence"] in ("SPLADE_MAX", "SPLADE_SUM")
        return PoolingSpec(
            tasks=tasks,
            token_heads=token_heads,
            sources=sources,
            **common | _embedding(spec, asked, is_sparse=is_sparse),
        )
    if common["sequence"] in ("SPLADE_MAX", "SPLADE_SUM"):
        raise ConfigError(f"--pooler-config: {common['sequence']} makes vectors; use --convert embed.")
    return PoolingSpec(tasks=tasks, sources=sources, **common | _classification(spec, asked))


def _conversion(model: ModelConfig, spec: ModelSpec) -> Conversion:
    """The model's output: vectors, classes, or "none" of these."""
    own = _kind_of(spec).output
    asked, sentence = model.convert, spec.sentence
    if model.runner == "generate":
        if asked in ("embed", "classify"):
            raise ConfigError(f"--convert {asked} makes a model whose output is not text; use --runner pooling.")
        if spec.is_encoder:
            raise ConfigError(
                f"--runner generate: {spec.name} ({spec.architecture}) is an encoder, which generates no text; leave "
                "--runner out, or use --runner pooling."
            )
        return "none"
    if asked in ("embed", "classify"):
        return asked
    if asked == "none":
        if own == "none" and (model.runner == "pooling" or spec.is_encoder):
            raise ConfigError(
                f"--convert none leaves {spec.architecture} without an output of --runner pooling; choose --convert "
                "embed or classify."
            )
        return own
    if model.runner == "auto" and sentence is None and own == "none" and not spec.is_encoder:
        return "none"
    if sentence is not None and sentence.kind == "scores":
        return "classify"
    if own == "none":
        return "classify" if spec.config_json.get("classifier_from_token") is not None else "embed"
    return own


def _kind_of(spec: ModelSpec) -> _Kind:
    return next((kind for ending, kind in _KINDS.items() if spec.architecture.endswith(ending)), _Kind("none"))


def _source(model: ModelConfig, spec: ModelSpec) -> str:
    if model.convert in ("embed", "classify"):
        return "--convert"
    return "modules.json" if spec.sentence is not None else "architectures"


def _tasks(spec: ModelSpec, kind: Conversion, asked: PoolerConfig, more: list[PoolingTask]) -> list[PoolingTask]:
    """The tasks that the model serves, `more` among them; the first one is for requests that name none."""
    tasks = [*(_EMBEDDING if kind == "embed" else _CLASSIFYING)]
    if kind == "classify" and _kind_of(spec).by_token:
        tasks = ["token_classify"]
    if spec.sentence is not None and spec.sentence.kind == "token vectors":
        tasks = ["token_embed"]
    tasks = [*tasks, *more]
    if asked.task is None:
        return tasks
    if asked.task not in tasks:
        raise ConfigError(
            f"--pooler-config names the task {asked.task}, and {spec.name} serves {', '.join(tasks)}; choose one of "
            "these, or another --convert."
        )
    return [asked.task, *(task for task in tasks if task != asked.task)]


def _stated_pooling(config: dict[str, Any]) -> SequencePooling | None:
    """The pooling that config.json names."""
    for field, names in _POOLING_FIELDS.items():
        if isinstance(name := config.get(field), str) and name in names:
            return names[name]
    return None


def _token_heads(spec: ModelSpec) -> dict[PoolingTask, TokenHead]:
    """The heads for tokens whose files the checkpoint has. The weight of a text's last token is that of its end."""
    config, folder = spec.config_json, Path(spec.path)
    ends = {"token_embed": None, "token_classify": config.get("eos_token_id")}
    return {
        task: replace(head, without_first=config.get("bos_token_id"), without_last=ends[task])
        for task, head in _TOKEN_HEADS.items()
        if (folder / head.file).is_file()
    }


def _common(spec: ModelSpec, asked: PoolerConfig, sources: dict[str, str]) -> dict[str, Any]:
    """The fields of a `PoolingSpec` that all models have; notes in `sources` where choices come from."""
    sentence = spec.sentence
    sequence = asked.sequence
    if sequence is not None:
        sources["pooling"] = "--pooler-config"
    elif sentence is not None and sentence.pooling is not None:
        sequence, sources["pooling"] = sentence.pooling, "modules.json"
    elif sentence is not None and sentence.pooling_fault is not None and sentence.kind == "vectors":
        raise ConfigError(sentence.pooling_fault)
    elif (stated := _stated_pooling(spec.config_json)) is not None:
        sequence, sources["pooling"] = stated, "config.json"
    else:
        sequence = "CLS" if spec.is_encoder else "LAST"
    found: dict[str, Any] = {"sequence": sequence, "token": asked.token or "ALL"}
    if sentence is not None:
        found |= {
            "prompts": sentence.prompts,
            "default_prompt_name": sentence.default_prompt_name,
            "similarity": sentence.similarity,
            "do_lower_case": sentence.do_lower_case,
            "includes_prompt": sentence.includes_prompt,
            "pair_template": sentence.pair_template,
            "template_variables": sentence.template_variables,
        }
    named = spec.config_json.get("task_instructions")
    if isinstance(named, dict) and named:  # as Jina's embedders have their prompts
        found["prompts"] = {name: text for name, text in named.items() if isinstance(text, str)}
    return found


def _embedding(spec: ModelSpec, asked: PoolerConfig, *, is_sparse: bool) -> dict[str, Any]:
    """The fields of a `PoolingSpec` of a model that makes vectors."""
    if is_sparse:
        _check_sparse(spec, asked)
    for name in ("logit_mean", "logit_sigma", "returned_token_ids"):
        if getattr(asked, name) is not None:
            raise ConfigError(f"--pooler-config: {name} is for classes; use --convert classify.")
    sentence, config = spec.sentence, spec.config_json
    dense = [] if sentence is None else sentence.dense
    normalizes = asked.use_activation
    if normalizes is None and is_sparse:
        normalizes = sentence is not None and sentence.normalizes
    elif normalizes is None:
        normalizes = True if sentence is None or sentence.kind == "token vectors" else sentence.normalizes
    matryoshka = config.get("matryoshka_dimensions") or ([] if config.get("is_matryoshka") else None)
    size = dense[-1].out_features if dense else spec.vocab_size if is_sparse else spec.hidden_size
    if asked.dimensions is not None and (matryoshka is None or asked.dimensions > size):
        raise ConfigError(
            f"--pooler-config: {spec.name} has no vectors of {asked.dimensions} dimensions; leave dimensions out, or "
            "say with --hf-overrides '{\"is_matryoshka\": true}' that parts of its vectors are vectors."
        )
    return {
        "use_activation": normalizes,
        "dense": dense,
        "embedding_size": size,
        "matryoshka": matryoshka,
        "dimensions": asked.dimensions,
        "step_tag_id": asked.step_tag_id,
        "enable_chunked_processing": asked.enable_chunked_processing,
        "max_embed_len": asked.max_embed_len,
    }


def _check_sparse(spec: ModelSpec, asked: PoolerConfig) -> None:
    """Raises ConfigError unless the model can weight its vocabulary as a whole."""
    if not _kind_of(spec).scores_vocabulary:
        raise ConfigError(
            f"{spec.name} ({spec.architecture}) scores no vocabulary at each token, as SPLADE needs; serve a "
            'checkpoint of a class ForMaskedLM, or choose --pooler-config \'{"seq_pooling_type": "MEAN"}\'.'
        )
    if asked.enable_chunked_processing:
        raise ConfigError("--pooler-config: enable_chunked_processing makes means, which SPLADE's weights are not.")


def _classification(spec: ModelSpec, asked: PoolerConfig) -> dict[str, Any]:
    """The fields of a `PoolingSpec` of a model that makes scores or probabilities of classes."""
    if asked.dimensions is not None or asked.enable_chunked_processing:
        name = "dimensions" if asked.dimensions is not None else "enable_chunked_processing"
        raise ConfigError(f"--pooler-config: {name} is for vectors; use --convert embed.")
    config, tokenizer_folder = spec.config_json, Path(spec.tokenizer_path)
    kind = _kind_of(spec)
    steps = asked.token == "STEP" or (asked.token is None and kind.has_steps)
    tag, scores = asked.step_tag_id, _token_scores(config, asked, tokenizer_folder)
    if steps and tag is None and scores is None:
        [tag] = find_token_ids(tokenizer_folder, [_STEP_TAG])
    return {
        "token": "STEP" if steps else "ALL",
        "use_activation": kind.activates if asked.use_activation is None else asked.use_activation,
        "classes": _classes(config, kind, scores, asked),
        "score_activation": _score_activation(config),
        "token_scores": scores,
        "joins_texts": _joins_texts(config, scores),
        "embedding_size": spec.hidden_size,
        "logit_mean": asked.logit_mean,
        "logit_sigma": asked.logit_sigma,
        "step_tag_id": tag,
        "returned_token_ids": asked.returned_token_ids,
    }


def _token_scores(config: dict[str, Any], asked: PoolerConfig, tokenizer_folder: Path) -> TokenScores | None:
    tokens = config.get("classifier_from_token")
    if asked.returned_token_ids is not None:
        return TokenScores(token_ids=asked.returned_token_ids)
    if tokens is None:
        return None
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


def _classes(config: dict[str, Any], kind: _Kind, scores: TokenScores | None, asked: PoolerConfig) -> list[str]:
    if scores is not None:
        if scores.as_difference:
            return ["LABEL_0"]
        return [str(name) for name in asked.returned_token_ids or config["classifier_from_token"]]
    names, count = config.get("id2label"), config.get("num_labels")
    if isinstance(names, dict) and names:
        return [str(names[key]) for key in sorted(names, key=int)]
    return [f"LABEL_{index}" for index in range(kind.num_classes if count is None else count)]


def _score_activation(config: dict[str, Any]) -> str:
    """The class of torch.nn.modules that makes probabilities of logits, or "auto"."""
    problem = config.get("problem_type")
    if problem in _BY_PROBLEM:
        return _BY_PROBLEM[problem]
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or config.get("sbert_ce_default_activation_function") or "auto"
    if name != "auto" and not str(name).startswith("torch.nn.modules."):
        raise ConfigError(f"config.json names the activation {name!r}; only classes of torch.nn.modules are there.")
    return str(name)
