"""Resolves what a model's output is, tokens or vectors, from the options and the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.core.config.model import ModelConfig
from quire.core.config.pooling import (
    RANKING_TOKENS,
    Conversion,
    PoolerConfig,
    PoolingSpec,
    RankingTokens,
    SequencePooling,
    TokenHead,
)
from quire.core.config.resolved import ModelSpec
from quire.core.config.task_adapters import TaskAdapters
from quire.core.errors import ConfigError
from quire.core.wire.pooling import PoolingTask
from quire.frontend.checkpoint.model_spec import read_json_if_present
from quire.frontend.checkpoint.token_lookup import find_token_ids
from quire.frontend.checkpoint.two_encoders import read_two_encoders
from quire.frontend.launch.pooling_classes import classification
from quire.frontend.launch.pooling_kinds import kind_of

_EMBEDDING: list[PoolingTask] = ["embed", "token_embed"]
_CLASSIFYING: list[PoolingTask] = ["classify", "token_classify"]
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
    sources = {"runner": "--runner" if model.runner == "pooling" else _source(model, spec)}
    common = _common(spec, kind, asked, sources)
    is_sparse = common["sequence"] in ("SPLADE_MAX", "SPLADE_SUM")
    tasks = _tasks(spec, kind, asked, _more_tasks(token_heads, has_both=spec.is_encoder and not is_sparse))
    common["io_processor_plugin"] = model.io_processor_plugin or spec.config_json.get("io_processor_plugin")
    if kind == "embed":
        return PoolingSpec(
            tasks=tasks,
            token_heads=token_heads,
            task_adapters=TaskAdapters.of(spec.hf_config, spec.name),
            sources=sources,
            **common | _embedding(spec, asked, is_sparse=is_sparse),
        )
    if is_sparse:
        raise ConfigError(f"--pooler-config: {common['sequence']} makes vectors; use --convert embed.")
    return PoolingSpec(tasks=tasks, sources=sources, **common | classification(spec, asked))


def _conversion(model: ModelConfig, spec: ModelSpec) -> Conversion:
    """The model's output: vectors, classes, or "none" of these."""
    own = kind_of(spec).output
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


def _source(model: ModelConfig, spec: ModelSpec) -> str:
    if model.convert in ("embed", "classify"):
        return "--convert"
    return "modules.json" if spec.sentence is not None else "architectures"


def _tasks(spec: ModelSpec, kind: Conversion, asked: PoolerConfig, more: list[PoolingTask]) -> list[PoolingTask]:
    """The tasks that the model serves, `more` among them; the first one is for requests that name none."""
    tasks = [*(_EMBEDDING if kind == "embed" else _CLASSIFYING)]
    if kind == "classify" and kind_of(spec).by_token:
        tasks = ["token_classify"]
    own = kind_of(spec)
    of_tokens = kind == "embed" and (own.projection is not None or own.ranks_lists)
    if of_tokens or (spec.sentence is not None and spec.sentence.kind == "token vectors"):
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


def _labels_are_late(spec: ModelSpec) -> bool:
    """Returns True if the labels of a text are the mean of those of its tokens."""
    return spec.hf_config.get("classifier_pooling") == "late"


def _token_heads(spec: ModelSpec) -> dict[PoolingTask, TokenHead]:
    """The heads for tokens whose files the checkpoint has. The weight of a text's last token is that of its end."""
    config, folder = spec.config_json, Path(spec.path)
    ends = {"token_embed": None, "token_classify": config.get("eos_token_id")}
    return {
        task: replace(head, without_first=config.get("bos_token_id"), without_last=ends[task])
        for task, head in _TOKEN_HEADS.items()
        if (folder / head.file).is_file()
    }


def _more_tasks(token_heads: Mapping[PoolingTask, TokenHead], *, has_both: bool) -> list[PoolingTask]:
    """The tasks that heads for tokens add to an embedder's; with `has_both`, weights of tokens beside a vector, too."""
    more: list[PoolingTask] = [task for task in token_heads if task not in _EMBEDDING]
    return [*more, "embed&token_classify"] if "token_classify" in more and has_both else more


def _common(spec: ModelSpec, kind: Conversion, asked: PoolerConfig, sources: dict[str, str]) -> dict[str, Any]:
    """The fields of a `PoolingSpec` that all models have; notes in `sources` where choices come from."""
    sentence = spec.sentence
    sequence = asked.sequence
    if sequence is not None:
        sources["pooling"] = "--pooler-config"
    elif sentence is not None and sentence.pooling is not None:
        sequence, sources["pooling"] = sentence.pooling, "modules.json"
    elif sentence is not None and sentence.pooling_fault is not None and sentence.kind == "vectors":
        raise ConfigError(sentence.pooling_fault)
    elif kind == "classify" and kind_of(spec).output == "classify" and _labels_are_late(spec):
        sequence, sources["pooling"] = "MEAN", "config.json"
    elif (stated := _stated_pooling(spec.config_json)) is not None:
        sequence, sources["pooling"] = stated, "config.json"
    else:
        sequence = "CLS" if spec.is_encoder and not spec.embeds_images else "LAST"
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
    kind = kind_of(spec)
    normalizes = asked.use_activation
    if normalizes is None and is_sparse:
        normalizes = sentence is not None and sentence.normalizes
    elif normalizes is None:
        plain = not kind.ranks_lists
        normalizes = plain if sentence is None or sentence.kind == "token vectors" else sentence.normalizes
    matryoshka = config.get("matryoshka_dimensions") or ([] if config.get("is_matryoshka") else None)
    projection = None if dense else kind.projection
    size = dense[-1].out_features if dense else spec.vocab_size if is_sparse else spec.hidden_size
    if projection is not None:
        size = _colbert_size(spec)
    ranking = None
    if kind.ranks_lists:
        size = config.get("embedding_size", 512)
        document, query = find_token_ids(Path(spec.tokenizer_path), RANKING_TOKENS)
        ranking = RankingTokens(document=document, query=query)
    if asked.dimensions is not None and (matryoshka is None or asked.dimensions > size):
        raise ConfigError(
            f"--pooler-config: {spec.name} has no vectors of {asked.dimensions} dimensions; leave dimensions out, or "
            "say with --hf-overrides '{\"is_matryoshka\": true}' that parts of its vectors are vectors."
        )
    return {
        "use_activation": normalizes,
        "dense": dense,
        "projection": projection,
        "ranking": ranking,
        "embedding_size": size,
        "fills_to": spec.max_position_embeddings if _fills_texts(spec) else 0,
        "matryoshka": matryoshka,
        "dimensions": asked.dimensions,
        "step_tag_id": asked.step_tag_id,
        "enable_chunked_processing": asked.enable_chunked_processing,
        "max_embed_len": asked.max_embed_len,
    }


def _fills_texts(spec: ModelSpec) -> bool:
    two = read_two_encoders(spec.config_json)
    return two is not None and two.fills_texts


def _colbert_size(spec: ModelSpec) -> int:
    """The elements of the vectors of tokens of ColBERT, or of ColPali's kind: what config.json or ColBERT's own file
    says, else the default there."""
    metadata = read_json_if_present(Path(spec.path) / "artifact.metadata")
    names = ("colbert_dim", "dim", "projection_dim", "embedding_dim")
    found = (*(spec.config_json.get(name) for name in names), metadata.get("dim"))
    return next((size for size in found if type(size) is int and size > 0), 128)


def _check_sparse(spec: ModelSpec, asked: PoolerConfig) -> None:
    """Raises ConfigError unless the model can weight its vocabulary as a whole."""
    if not kind_of(spec).scores_vocabulary:
        raise ConfigError(
            f"{spec.name} ({spec.architecture}) scores no vocabulary at each token, as SPLADE needs; serve a "
            'checkpoint of a class ForMaskedLM, or choose --pooler-config \'{"seq_pooling_type": "MEAN"}\'.'
        )
    if asked.enable_chunked_processing:
        raise ConfigError("--pooler-config: enable_chunked_processing makes means, which SPLADE's weights are not.")
