"""Answers the lines of a batch with the same code that answers HTTP requests."""

import asyncio
import functools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from quire.core.errors import EngineDeadError, NotFoundError, OverloadedError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.audio.service import SpeechToText
from quire.frontend.batch.lines import digest_of, line_id, read_custom_id
from quire.frontend.batch.speech_lines import SpeechLines, TranscriptionLine, TranslationLine
from quire.frontend.chat.conversation import Conversations
from quire.frontend.http.errors import Problem, describe
from quire.frontend.http.json_request import BodyReader, decode_body
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from quire.frontend.pooling.fields import VectorBody
from quire.frontend.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.requests.deadline import limit_time

logger = get_logger(__name__)


MAX_LOGGED = 20
"""Failed lines that the log names one by one."""


class BatchRequest(Struct):
    """One line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(Struct):
    """The response that a server would have sent."""

    status_code: int
    request_id: str
    body: Any


class BatchError(Struct):
    """Why a request failed, and the line of the input that holds it."""

    code: str
    message: str
    line: int


class BatchAnswer(Struct):
    """One line of the output; `error` is null when the request succeeded.

    Attributes:
        line: the number of the request's line in the input, from 1.
        digest: of that line; a resumed run finds the answer by it.
    """

    id: str
    custom_id: str | None
    response: BatchResponse
    error: BatchError | None = None
    line: int = 0
    digest: str = ""


class _Route(NamedTuple):
    """The service behind one URL, and the type of its bodies."""

    kind: type
    complete: Callable[[Any], Awaitable[Any]]


class BatchServer:
    """Answers single lines with the same code that answers HTTP requests."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig) -> None:
        conversations = Conversations(engine, server)
        chat = ChatCompletions(engine, server, conversations)
        text = TextCompletions(engine, server, conversations)
        pooling = PoolingServices(engine, server, conversations)
        self._reader = BodyReader(strict=server.strict_fields)
        self._num_logged = 0
        speech = SpeechLines(SpeechToText(engine, conversations))
        ranks, scores = _Route(RerankRequest, pooling.scoring.rerank), _Route(ScoreRequest, pooling.scoring.score)
        self._routes = {
            "/v1/chat/completions": _Route(ChatRequest, chat.complete),
            "/v1/completions": _Route(CompletionRequest, text.complete),
            "/v1/audio/transcriptions": _Route(TranscriptionLine, speech.complete),
            "/v1/audio/translations": _Route(TranslationLine, speech.complete),
            "/v1/embeddings": _Route(EmbeddingRequest, functools.partial(_json_vectors, pooling.embeddings.create)),
            "/pooling": _Route(PoolingRequest, functools.partial(_json_vectors, pooling.pooled.create)),
            "/classify": _Route(ClassificationRequest, pooling.classifications.create),
            **dict.fromkeys(("/v1/score", "/score"), scores),
            **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), ranks),
        }

    async def answer(self, number: int, line: bytes) -> BatchAnswer:
        """The answer to line `number`; a fault of the line becomes an answer with an error.

        Raises:
            EngineDeadError: there is no engine any more, so no further line can be answered.
        """
        custom_id = read_custom_id(line)
        digest = digest_of(line)
        answer_id = line_id(number) if custom_id is None else f"batch_req_{uuid.uuid4().hex}"
        try:
            body = await self._complete(decode_body(line, BatchRequest))
        except EngineDeadError:
            raise
        except Exception as error:  # as in a server, a failure ends one request only
            problem = describe(error)
            self._log_error(number, error, problem)
            response = BatchResponse(problem.status, answer_id, msgspec.Raw(problem.body()))
            failure = BatchError(str(problem.status), problem.message, number)
            return BatchAnswer(answer_id, custom_id, response, failure, number, digest)
        return BatchAnswer(
            answer_id, custom_id, BatchResponse(200, _id_of(body) or answer_id, body), None, number, digest
        )

    def _log_error(self, number: int, error: Exception, problem: Problem) -> None:
        """Logs a line's failure; those of a user's making only while they are few."""
        if problem.status == 500 and not isinstance(error, ParameterError):
            logger.error("line %d failed", number, exc_info=error)
            return
        self._num_logged += 1
        if self._num_logged <= MAX_LOGGED:
            logger.warning("line %d failed: %s", number, problem.message)
        if self._num_logged == MAX_LOGGED:
            logger.warning("further failures are in the output only")

    async def _complete(self, request: BatchRequest) -> Any:
        if request.method != "POST":
            raise ParameterError(f"method must be POST, got {request.method!r}.", param="method")
        route = self._routes.get(request.url)
        if route is None:
            raise NotFoundError(f"url must be one of {', '.join(self._routes)}; got {request.url!r}.", param="url")
        body, _ = self._reader.read(bytes(request.body), route.kind)
        limit_time(None, body.timeout)
        if isinstance(body, GenerationRequest) and body.stream:
            raise ParameterError("stream must not be true in a batch.", param="stream")
        while True:
            try:
                return await route.complete(body)
            except OverloadedError as error:  # a batch has time
                await asyncio.sleep(error.retry_after_seconds)


def _id_of(body: Struct) -> str | None:
    """The id of an answer that has one."""
    return body.id if "id" in body.__struct_fields__ else None  # type: ignore[attr-defined]


async def _json_vectors(create: Callable[[Any], Awaitable[Any]], request: VectorBody) -> Any:
    """The vectors as JSON. Raises RequestError and EngineError."""
    if request.format in ("bytes", "bytes_only"):
        raise ParameterError(
            f"encoding_format {request.format} is no JSON, and a line of a batch is; take base64.",
            param="encoding_format",
        )
    return await create(request)
