"""`quire run-batch`: runs a file in OpenAI's batch format through a new engine, one JSON line a request.

Lines in: `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. Lines out, in the order
in which they finish: `{"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": ...}`.
"""

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError, EngineDeadError, NotFoundError, OverloadedError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.batch import files as batch_files
from quire.frontend.batch.config import BatchConfig
from quire.frontend.batch.output_file import OutputFile
from quire.frontend.chat.conversation import Conversations
from quire.frontend.http.errors import Problem, describe
from quire.frontend.http.json_request import BodyReader, decode_body
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.progress import LoggedProgress, RequestProgress, open_progress

logger = get_logger(__name__)


MAX_TOLD = 20
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
    """One line of the output; `error` is null when the request succeeded."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: BatchError | None = None


class _PartialRequest(Struct):
    """The id of a line that is JSON, but perhaps no valid request."""

    custom_id: str | None = None


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
        self._reader = BodyReader(strict=server.strict_fields)
        self._num_told = 0
        self._routes = {
            "/v1/chat/completions": _Route(ChatRequest, chat.complete),
            "/v1/completions": _Route(CompletionRequest, text.complete),
        }

    async def answer(self, number: int, line: bytes) -> BatchAnswer:
        """The answer to line `number`; a fault of the line becomes an answer with an error.

        Raises:
            EngineDeadError: there is no engine any more, so no further line can be answered.
        """
        custom_id = read_custom_id(line)
        answer_id = line_id(number) if custom_id is None else f"batch_req_{uuid.uuid4().hex}"
        try:
            body = await self._complete(decode_body(line, BatchRequest))
        except EngineDeadError:
            raise
        except Exception as error:  # as in a server, a failure ends one request only
            problem = describe(error)
            self._tell(number, error, problem)
            response = BatchResponse(problem.status, answer_id, msgspec.Raw(problem.body()))
            return BatchAnswer(answer_id, custom_id, response, BatchError(str(problem.status), problem.message, number))
        return BatchAnswer(answer_id, custom_id, BatchResponse(200, body.id, body))

    def _tell(self, number: int, error: Exception, problem: Problem) -> None:
        """Logs a line's failure; those of a user's making only while they are few."""
        if problem.status == 500 and not isinstance(error, ParameterError):
            logger.error("line %d failed", number, exc_info=error)
            return
        self._num_told += 1
        if self._num_told <= MAX_TOLD:
            logger.warning("line %d failed: %s", number, problem.message)
        if self._num_told == MAX_TOLD:
            logger.warning("further failures are in the output only")

    async def _complete(self, request: BatchRequest) -> Any:
        if request.method != "POST":
            raise ParameterError(f"method must be POST, got {request.method!r}.", param="method")
        route = self._routes.get(request.url)
        if route is None:
            raise NotFoundError(f"url must be one of {', '.join(self._routes)}; got {request.url!r}.", param="url")
        body, _ = self._reader.read(bytes(request.body), route.kind)
        if body.stream:
            raise ParameterError("stream must not be true in a batch.", param="stream")
        while True:
            try:
                return await route.complete(body)
            except OverloadedError as error:  # a batch has time
                await asyncio.sleep(error.retry_after_seconds)


def read_custom_id(line: bytes) -> str | None:
    """The line's custom_id; None when the line cannot be read."""
    try:
        return msgspec.json.decode(line, type=_PartialRequest).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:  # the standard library reads some lines that msgspec refuses, such as those with lone surrogates
        custom_id = json.loads(line)["custom_id"]
        return custom_id if custom_id.isprintable() else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def key_of(number: int, line: bytes) -> str:
    """The key by which a resumed run finds the answer to the line."""
    return read_custom_id(line) or line_id(number)


def line_id(number: int) -> str:
    """Id of the answer to a line without a custom_id, the same in every run."""
    return f"batch_req_line_{number}"


class BatchRun:
    """Puts a bounded number of lines in flight, and writes answers as they come."""

    def __init__(self, server: BatchServer, output: OutputFile, max_in_flight: int, progress: RequestProgress) -> None:
        self._server = server
        self._output = output
        self._places = asyncio.Semaphore(max_in_flight)
        self._progress = progress
        self._encode = msgspec.json.Encoder().encode
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.num_succeeded = 0
        self.num_failed = 0
        self.num_skipped = 0

    async def run(self, path: Path) -> None:
        """Answers every line of `path` that has no answer yet.

        Raises:
            EngineDeadError: the engine is gone; what was answered until then is in the output.
        """
        try:
            for number, line in batch_files.read_lines(path):
                if key_of(number, line) in self._output.answered:
                    self.num_skipped += 1
                    self._progress.advance(0)
                    continue
                await self._places.acquire()
                if self._failure is not None:
                    break
                task = asyncio.create_task(self._answer(number, line))
                self._tasks.add(task)
                task.add_done_callback(self._end)
            while self._tasks and self._failure is None:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    async def _answer(self, number: int, line: bytes) -> None:
        answer = await self._server.answer(number, line)
        self._output.write(self._encode(answer))
        if answer.error is None:
            self.num_succeeded += 1
            self._progress.advance(answer.response.body.usage.completion_tokens)
        else:
            self.num_failed += 1
            self._progress.advance(0)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()


async def run_batch(engine_args: EngineArgs, batch: BatchConfig, server: ServerConfig | None = None) -> int:
    """Runs a whole batch. Returns the exit code: 0 when the run came to its end, as in vLLM; requests may have failed.

    Only those options of `server` count that shape answers, such as the chat template.

    Raises:
        ConfigError: an option or a file is wrong.
        EngineDeadError: the engine died for good.
    """
    if batch.resume and batch_files.is_url(batch.output_file):
        raise ConfigError("--resume needs an --output-file on this machine; a URL cannot be continued.")
    if batch.resume and batch.overwrite:
        raise ConfigError("--resume keeps the answers that --overwrite would remove; give one of them.")
    if batch.input_file == batch.output_file or _is_one_file(batch.input_file, batch.output_file):
        raise ConfigError("--input-file and --output-file must differ.")
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(batch_files.open_input(batch.input_file))
        replace = batch.resume or batch.overwrite
        target = await stack.enter_async_context(batch_files.open_output(batch.output_file, replace=replace))
        output = stack.enter_context(contextlib.closing(OutputFile(target, resume=batch.resume)))
        server = server or ServerConfig()
        server.check_logs(engine_args.observability)
        engine = AsyncLLM.from_engine_args(
            engine_args,
            usage="llm",
            max_log_len=server.max_log_len,
            log_outputs=server.enable_log_outputs,
            log_deltas=server.enable_log_deltas,
        )
        stack.push_async_callback(engine.aclose)
        answers = BatchServer(engine, server)  # reports a wrong option before the model is loaded
        if all(key_of(number, line) in output.answered for number, line in batch_files.read_lines(source)):
            logger.info("no request is left to answer: %d were answered before", batch_files.count_lines(source))
            return 0
        await engine.start()
        with _progress(batch_files.count_lines(source)) as progress:
            run = BatchRun(answers, output, max_in_flight(engine, batch), progress)
            started = time.monotonic()
            if engine.profiles:
                await engine.start_profile()
                stack.push_async_callback(engine.stop_profile)
            await run.run(source)
        logger.info(
            "requests that succeeded: %d, failed: %d, were answered before: %d; %.1f s",
            *(run.num_succeeded, run.num_failed, run.num_skipped, time.monotonic() - started),
        )
    return 0


def _progress(total: int) -> contextlib.AbstractContextManager[RequestProgress]:
    """A bar on a terminal; else a line in the log now and then."""
    if sys.stderr.isatty():
        return open_progress("Requests", total)
    return contextlib.nullcontext(LoggedProgress(total))


def _is_one_file(first: str, second: str) -> bool:
    """Returns True if two names lead to one file: writing answers there would destroy unread requests."""
    return Path(first).exists() and Path(second).exists() and Path(first).samefile(second)


def max_in_flight(engine: AsyncLLM, batch: BatchConfig) -> int:
    """Most lines in flight: keeps the engine full while answers are written, and fits its queue."""
    limits = engine.config.limits
    wanted = batch.max_in_flight or 2 * limits.max_num_seqs
    if limits.max_num_queued_reqs is None:
        return wanted
    return min(wanted, limits.max_num_seqs + limits.max_num_queued_reqs)
