"""Response bodies, as Text Embeddings Inference has them."""

from typing import Any, Literal

from msgspec import Struct

ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiError(Struct):
    """Body of every answer that is not a success."""

    error: str
    error_type: ErrorType


class Prediction(Struct):
    """A label and its score."""

    score: float
    label: str


class Rank(Struct, kw_only=True, omit_defaults=True):
    """The place of a text in the request, and its score."""

    index: int
    text: str | None = None
    score: float


class Token(Struct, kw_only=True):
    """A token, and its place in the bytes of its text; one that the tokenizer adds has none."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class SparseValue(Struct):
    """One element of a vector that is not zero."""

    index: int
    value: float


class EmbeddingModel(Struct):
    """A model that makes vectors."""

    pooling: str


class ClassifierModel(Struct):
    """A model that makes probabilities of labels."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(Struct, omit_defaults=True, kw_only=True):
    """One of the three kinds."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None


class VertexResponse(Struct):
    """Answer of POST /vertex: that of each instance, as the model's own route gives it."""

    predictions: list[Any]


class Info(Struct, kw_only=True):
    """Answer of GET /info."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool = False
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None
