"""MTEB: a task of similarity and one of classification, made here, of vectors that OpenAI's client asks for."""

from typing import Any

import mteb
import numpy as np
import openai
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from vectors import QUERY, TEXTS, URL, VECTORS

server = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")


class Encoder(AbsEncoder):
    """The server, as MTEB sees a model."""

    mteb_model_meta = ModelMeta.create_empty({"name": "quire/demo", "revision": "1"})

    def encode(self, inputs: Any, **_: Any) -> np.ndarray:
        texts = [text for batch in inputs for text in batch["text"]]
        return np.array([each.embedding for each in server.embeddings.create(model="quire-demo", input=texts).data])


def described(name: str, kind: str, score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, type=kind, main_score=score, description=name, reference=None, category="t2t", modalities=["text"],
        eval_splits=["test"], eval_langs=["eng-Latn"], dataset={"path": "quire/none", "revision": "1"}, date=None,
        domains=None, task_subtypes=None, license=None, annotations_creators=None, dialect=None, sample_creation=None,
        bibtex_citation=None,
    )  # fmt: skip


class Similarity(AbsTaskSTS):
    """Pairs whose scores are the server's own cosines, so that the correlation is 1."""

    metadata = described("QuireSTS", "STS", "cosine_spearman")
    min_score, max_score = -1, 1

    def load_data(self, **_: Any) -> None:
        rows = [
            {"sentence1": QUERY, "sentence2": text, "score": float(np.dot(VECTORS[0], vector))}
            for text, vector in zip(TEXTS, VECTORS, strict=True)
        ]
        self.dataset, self.data_loaded = DatasetDict(test=Dataset.from_list(rows)), True


class Classes(AbsTaskClassification):
    """Texts of two classes, the same ones for training, so that all are found."""

    metadata = described("QuireClasses", "Classification", "accuracy")
    samples_per_label = 4

    def load_data(self, **_: Any) -> None:
        rows = [{"text": text * count, "label": label} for count in range(1, 5) for label, text in enumerate(TEXTS[:2])]
        self.dataset, self.data_loaded = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows)), True


results = mteb.evaluate(Encoder(), [Similarity(), Classes()], cache=None)
scores = {each.task_name: each.get_score() for each in results.task_results}
assert scores["QuireSTS"] > 0.9999, scores
assert scores["QuireClasses"] > 0.9, scores
