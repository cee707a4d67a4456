"""Response bodies, as OpenAI, Jina and vLLM spell them.

Vectors are written into JSON before the rest of an answer (`vectors.py`): a field of vectors holds a `Raw`.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from quire.frontend.openai.answers import CompletionUsage


class Chunk(Struct):
    """The tokens and the characters that one vector is of: begin and end; without characters where none are known."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunking(Struct, kw_only=True):
    """The parts of an input that its vectors are of."""

    chunk_size: int
    input_tokens: int
    chunks: list[Chunk]
    strategy: str


class Embedding(Struct, kw_only=True):
    """The vector of one input, or those of its tokens."""

    index: int
    object: str = "embedding"
    embedding: list[float | list[float]] | str
    late_chunking: LateChunking | UnsetType = UNSET


class EmbeddingResponse(Struct, kw_only=True):
    """Answer of POST /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: CompletionUsage


class PooledData(Struct, kw_only=True):
    """The pooled output of one input."""

    index: int
    object: str = "pooling"
    data: list[float | list[float]] | str


class PoolingResponse(Struct, kw_only=True):
    """Answer of POST /pooling."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: CompletionUsage


class PluginResponse(Struct, kw_only=True):
    """Answer of POST /pooling to a body with `data`: what the plugin made of the outputs."""

    request_id: str
    created_at: int
    data: Any

    @property
    def id(self) -> str:
        """The name that other answers have for `request_id`."""
        return self.request_id


class Classification(Struct, kw_only=True):
    """The probabilities of one input's labels; `label` is the likeliest."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(Struct, kw_only=True):
    """Answer of POST /classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: CompletionUsage


class Score(Struct, kw_only=True):
    """How well the texts of one pair belong together."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(Struct, kw_only=True):
    """Answer of POST /score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: CompletionUsage


class RankedDocument(Struct):
    """A document as it was sent."""

    text: str
    multi_modal: None = None


class Ranked(Struct, kw_only=True):
    """The place of a document in the request, and its score."""

    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class RerankUsage(Struct):
    """Tokens of all pairs."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(Struct, kw_only=True):
    """Answer of POST /rerank: the best first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[Ranked]
