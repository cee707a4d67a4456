"""Bodies of requests, with the fields of OpenAI's, Jina's, Cohere's and vLLM's APIs."""

from typing import Any, ClassVar

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.pooling import PoolingTask
from quire.core.wire.pooling_params import LateChunkingParams, PoolingParams, check_task
from quire.frontend.pooling.fields import MAX_INPUTS, InputBody, PooledBody, VectorBody
from quire.frontend.requests.scored_pairs import Sides


class ChunkSize(Struct, forbid_unknown_fields=True):
    """Tokens whose vectors are averaged to one."""

    chunk_size: int


class EmbeddingRequest(VectorBody, kw_only=True):
    """Body of POST /v1/embeddings."""

    late_chunking_params: ChunkSize | None = None  # for models of token vectors
    task: str | None = None  # chooses an adapter of the checkpoint, as in Jina's API

    def params(self, task: PoolingTask) -> PoolingParams:
        """The engine's parameters. Raises ParameterError."""
        chunks = self.late_chunking_params
        return PoolingParams(
            task=task,
            dimensions=self.dimensions,
            use_activation=self.use_activation,
            late_chunking_params=None if chunks is None else LateChunkingParams(chunks.chunk_size),
        )


class PoolingRequest(VectorBody, kw_only=True):
    """Body of POST /pooling. `data` is for --io-processor-plugin."""

    task: str | None = None
    data: Any = None

    def check(self) -> None:
        """As for all bodies with inputs, unless it is for a plugin."""
        check_task(self.task)
        if self.data is None:
            super().check()
            return
        PooledBody.check(self)
        if self.task not in (None, "plugin"):
            raise ParameterError("data is for the task plugin; leave task out.", param="task")


class ClassificationRequest(InputBody, kw_only=True):
    """Body of POST /classify."""


ScoredText = str | dict[str, Any]
"""A text, or `{"text": ...}`, or `{"content": [parts]}` with parts of text."""


class PairsBody(PooledBody, kw_only=True):
    """Fields of bodies whose pairs of texts are scored."""

    max_tokens_per_query: int | None = None  # 0: not cut
    max_tokens_per_doc: int | None = None
    instruction: str | None = None  # a variable of the template
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the template that writes a pair."""
        given = {} if self.instruction is None else {"instruction": self.instruction}
        return given | (self.chat_template_kwargs or {})


class ScoreRequest(PairsBody, kw_only=True):
    """Body of POST /score. A pair of fields has the texts on either side: one and one, one and many, or as many."""

    SIDES: ClassVar = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))

    queries: ScoredText | list[ScoredText] | None = None
    documents: ScoredText | list[ScoredText] | None = None
    items: ScoredText | list[ScoredText] | None = None
    data_1: ScoredText | list[ScoredText] | None = None
    data_2: ScoredText | list[ScoredText] | None = None
    text_1: ScoredText | list[ScoredText] | None = None
    text_2: ScoredText | list[ScoredText] | None = None

    def sides(self) -> Sides:
        """The texts on either side.

        Raises:
            ParameterError: fields are missing or do not belong together, or their lengths differ.
        """
        given = {name for names in self.SIDES for name in names if getattr(self, name) is not None}
        names = next((names for names in self.SIDES if given == set(names)), None)
        if names is None:
            raise ParameterError(
                "The body must have two sides of texts: queries and documents, queries and items, data_1 and data_2, "
                f"or text_1 and text_2; got {', '.join(sorted(given)) or 'none'}.",
                param="queries",
            )
        first, second = (texts_of(getattr(self, name), name) for name in names)
        if len(first) not in (1, len(second)):
            raise ParameterError(
                f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send one and many, or as many.",
                param=names[0],
            )
        return Sides(first, second, names)


class RerankRequest(PairsBody, kw_only=True):
    """Body of POST /rerank, /v1/rerank and /v2/rerank, in Jina's form and in Cohere's."""

    query: ScoredText
    documents: ScoredText | list[ScoredText]
    top_n: int | None = None  # 0: all
    return_documents: bool | None = None

    def check(self) -> None:
        """As for all bodies; also checks `top_n`."""
        super().check()
        if self.top_n is not None and self.top_n < 0:
            raise ParameterError(f"top_n must be at least 0, which means all; got {self.top_n}.", param="top_n")

    def sides(self) -> Sides:
        """The query, and the documents. Raises ParameterError for what is no text."""
        query, documents = texts_of(self.query, "query"), texts_of(self.documents, "documents")
        return Sides(query, documents, ("query", "documents"))


def texts_of(given: ScoredText | list[ScoredText], name: str) -> list[str]:
    """The texts of one side.

    Raises:
        ParameterError: there is none, there are too many, or one is no text.
    """
    if isinstance(given, list):
        texts = [_text_of(each, f"{name}[{index}]") for index, each in enumerate(given)]
    else:
        texts = [_text_of(given, name)]
    if not texts:
        raise ParameterError(f"{name} must not be empty.", param=name)
    if len(texts) > MAX_INPUTS:
        raise ParameterError(f"{name} has {len(texts)} texts; at most {MAX_INPUTS} are scored at once.", param=name)
    return texts


def _text_of(given: ScoredText, name: str) -> str:
    if isinstance(given, str):
        return given
    if set(given) == {"text"} and isinstance(given["text"], str):
        return given["text"]
    parts = given.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    raise ParameterError(
        f"{name} must be a text: this server takes and gives text only. An object may have text alone, or content with "
        "parts of text.",
        param=name,
    )
