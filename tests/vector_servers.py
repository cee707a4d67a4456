"""Fixtures: servers of models that make vectors, labels and scores, which the tests of several protocols share."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.servers import ServerProcess

PROMPTS = {"query": "search: ", "document": "text: "}
LABELS = ["good", "bad", "ugly"]
SMALL = ("--num-gpu-blocks-override", "256", "--max-model-len", "64", "--device", "cpu")


@pytest.fixture(scope="session")
def embedding_checkpoint(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the files of sentence-transformers: the mean of all tokens, normalized, and prompts by name."""
    folder = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 32]}))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


def classifier(checkpoint: Callable[..., Path], folder: Path, labels: list[str]) -> Path:
    """A tiny Llama with a classifier of random weights."""
    shutil.copytree(checkpoint("llama"), folder)
    torch.manual_seed(1)
    names = dict(enumerate(labels))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(labels), id2label=names, label2id={name: index for index, name in names.items()}
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ranking_checkpoint(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with one class."""
    return classifier(checkpoint, tmp_path_factory.mktemp("ranker") / "model", ["LABEL_0"])


@pytest.fixture(scope="session")
def labelling_checkpoint(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with three classes."""
    return classifier(checkpoint, tmp_path_factory.mktemp("labeller") / "model", LABELS)


def serve(folder: Path, model: Path, *options: str) -> Iterator[ServerProcess]:
    process = ServerProcess(folder, str(model), "--served-model-name", "tiny", *SMALL, *options)
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="session")
def embedding_server(embedding_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `quire serve` process that makes vectors."""
    yield from serve(tmp_path_factory.mktemp("embedding"), embedding_checkpoint)


@pytest.fixture(scope="session")
def ranking_server(ranking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `quire serve` process that scores pairs."""
    yield from serve(tmp_path_factory.mktemp("ranking"), ranking_checkpoint)


@pytest.fixture(scope="session")
def labelling_server(labelling_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `quire serve` process that gives labels."""
    yield from serve(tmp_path_factory.mktemp("labelling"), labelling_checkpoint)
