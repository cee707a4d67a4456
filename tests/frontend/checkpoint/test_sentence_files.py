"""The files of sentence-transformers beside a model, as versions 2 to 5 write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.pooling import DenseLayer, SentenceModel
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.sentence_files import read_sentence_model

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    """Entries of modules.json; the first has no folder."""
    names = [kind.rpartition(".")[2] for kind in kinds]
    paths = ["", *(f"{index}_{name}" for index, name in enumerate(names[1:], start=1))]
    return [
        {"idx": index, "path": path, "type": kind} for index, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]


MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def pooling(*chosen: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{mode}": mode in chosen for mode in MODES}


def test_a_folder_without_modules_has_none(tmp_path: Path) -> None:
    assert read_sentence_model(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (pooling("cls_token"), "CLS"),
        (pooling("mean_tokens"), "MEAN"),
        (pooling("lasttoken"), "LAST"),
        ({"embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": True}, "MEAN"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "MEAN"),
    ],
)
def test_the_pooling(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    write(tmp_path, {"modules.json": modules(f"{OLD}Transformer", f"{OLD}Pooling"), "1_Pooling/config.json": config})
    assert read_sentence_model(tmp_path) == SentenceModel(
        pooling=expected,  # type: ignore[arg-type]
        includes_prompt=config.get("include_prompt", True),
    )


@pytest.mark.parametrize("chosen", [("max_tokens",), ("cls_token", "mean_tokens"), ()])
def test_a_pooling_that_is_not_there_is_told(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    files = {"modules.json": modules(f"{OLD}Transformer", f"{OLD}Pooling"), "1_Pooling/config.json": pooling(*chosen)}
    found = read_sentence_model(write(tmp_path, files))
    assert found is not None
    assert found.pooling is None
    assert "--pooler-config" in (found.pooling_fault or "")


def test_everything_at_once(tmp_path: Path) -> None:
    sizes, plain = {"in_features": 8, "out_features": 4}, "torch.nn.modules.linear.Identity"
    kinds = ("transformer.Transformer", "pooling.Pooling", "dense.Dense", "normalize.Normalize")
    files = {
        "modules.json": modules(*(f"{NEW}{kind}" for kind in kinds)),
        "1_Pooling/config.json": pooling("mean_tokens"),
        "2_Dense/config.json": sizes | {"bias": False, "activation_function": plain},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: ", "document": "passage: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
    }
    assert read_sentence_model(write(tmp_path, files)) == SentenceModel(
        pooling="MEAN",
        normalizes=True,
        dense=[DenseLayer(folder="2_Dense", bias=False, activation=plain, **sizes)],
        max_seq_length=256,
        do_lower_case=True,
        prompts={"query": "query: ", "document": "passage: "},
        default_prompt_name="query",
        similarity="dot",
    )


def test_a_dense_layer_that_says_nothing_has_a_tanh(tmp_path: Path) -> None:
    files = {
        "modules.json": modules(f"{OLD}Transformer", "pylate.models.Dense.Dense"),
        "1_Dense/config.json": {"in_features": 8, "out_features": 4},
    }
    found = read_sentence_model(write(tmp_path, files))
    assert found is not None
    assert (found.kind, found.dense[0].activation) == ("token vectors", "torch.nn.modules.activation.Tanh")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_strategy": "max", "activation_function": "relu"}, "SPLADE_MAX"),
        ({"pooling_strategy": "sum", "word_embedding_dimension": None}, "SPLADE_SUM"),
        ({"pooling_strategy": "max", "activation_function": "log1p_relu"}, None),
    ],
)
def test_weights_of_the_vocabulary(tmp_path: Path, config: dict[str, Any], pooling: str | None) -> None:
    kinds = ("sparse_encoder.models.MLMTransformer", "sparse_encoder.models.SpladePooling")
    files = {
        "modules.json": modules(*(f"sentence_transformers.{kind}" for kind in kinds)),
        "1_SpladePooling/config.json": config,
    }
    found = read_sentence_model(write(tmp_path, files))
    assert found is not None
    assert (found.kind, found.pooling, found.normalizes) == ("vectors", pooling, False)
    assert (found.pooling_fault is None) == (pooling is not None)


def test_a_cross_encoder(tmp_path: Path) -> None:
    files = {
        "modules.json": modules("sentence_transformers.base.modules.transformer.Transformer"),
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
    }
    found = read_sentence_model(write(tmp_path, files))
    assert found == SentenceModel(kind="scores")


@pytest.mark.parametrize(
    ("saved", "template", "variables"),
    [
        (None, "default", {}),
        ({"chat_template": "default", "a": "Judge", "restore_suffix": True}, "default", {"a": "Judge"}),
        ({"chat_template": "rerank", "add_generation_prompt": True}, "rerank", {"add_generation_prompt": True}),
    ],
)
def test_a_cross_encoder_whose_pairs_are_messages(
    tmp_path: Path, saved: dict[str, Any] | None, template: str, variables: dict[str, Any]
) -> None:
    files = {
        "modules.json": modules("sentence_transformers.base.modules.transformer.Transformer"),
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
        "sentence_bert_config.json": {
            "transformer_task": "sequence-classification",
            "modality_config": {"message": {"method": "forward"}},
            "processing_kwargs": {} if saved is None else {"chat_template": saved},
        },
    }
    found = read_sentence_model(write(tmp_path, files))
    assert found == SentenceModel(kind="scores", pair_template=template, template_variables=variables)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"modules.json": "["}, "Cannot read"),
        ({"modules.json": [1]}, "must list modules"),
        ({"modules.json": modules("T", f"{OLD}Dense"), "1_Dense/config.json": {}}, "in_features and out_features"),
        ({"modules.json": [], "sentence_bert_config.json": {"max_seq_length": "x"}}, "max_seq_length"),
        ({"modules.json": modules("T", f"{OLD}LogitScore"), "1_LogitScore/config.json": {}}, "must have true_token_id"),
        ({"modules.json": [], "config_sentence_transformers.json": {"prompts": ["x"]}}, "texts by name"),
        (
            {
                "modules.json": [],
                "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
                "sentence_bert_config.json": {
                    "modality_config": {"message": {}},
                    "processing_kwargs": {"chat_template": "x"},
                },
            },
            "must be an object",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_sentence_model(write(tmp_path, files))
