"""`quire run-batch`: runs a file in OpenAI's batch format through a new engine, one JSON line a request.

Lines in: `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. Lines out, in the order
in which they finish: `{"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": ...}`.
"""

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.batch import files as batch_files
from quire.frontend.batch.batch_server import BatchServer
from quire.frontend.batch.config import BatchConfig
from quire.frontend.batch.output_file import OutputFile
from quire.frontend.batch.resuming import Lines
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import CompletionUsage
from quire.frontend.pooling.answers import RerankUsage
from quire.frontend.progress import LoggedProgress, RequestProgress, open_progress

logger = get_logger(__name__)


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

    async def run(self, path: Path, lines: Lines) -> None:
        """Answers every line of `path` that has no answer yet, as `lines` say.

        Raises:
            EngineDeadError: the engine is gone; what was answered until then is in the output.
        """
        try:
            for index, (number, line) in enumerate(batch_files.read_lines(path)):
                if lines.is_answered(index):
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
            self._progress.advance(_num_tokens(answer.response.body))
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
        lines = output.answers.match(source)
        _tell(lines)
        if lines.num_answered == len(lines):
            logger.info("no request is left to answer: %d were answered before", len(lines))
            return 0
        await engine.start()
        with _progress(len(lines)) as progress:
            run = BatchRun(answers, output, max_in_flight(engine, batch), progress)
            started = time.monotonic()
            if engine.profiles:
                await engine.start_profile()
                stack.push_async_callback(engine.stop_profile)
            await run.run(source, lines)
        logger.info(
            "requests that succeeded: %d, failed: %d, were answered before: %d; %.1f s",
            *(run.num_succeeded, run.num_failed, run.num_skipped, time.monotonic() - started),
        )
    return 0


def _tell(lines: Lines) -> None:
    """Logs what the user may not expect of the input."""
    if lines.num_repeated:
        logger.warning(
            "requests whose custom_id an earlier line has: %d, such as %s; each is answered, and its answer names the "
            "line",
            *(lines.num_repeated, ", ".join(map(repr, lines.repeated))),
        )
    if lines.num_unmatched:
        logger.warning(
            "answers in the output to requests that the input does not have, or not in this form: %d; they stay",
            lines.num_unmatched,
        )


def _progress(total: int) -> contextlib.AbstractContextManager[RequestProgress]:
    """A bar on a terminal; else a line in the log now and then."""
    if sys.stderr.isatty():
        return open_progress("Requests", total)
    return contextlib.nullcontext(LoggedProgress(total))


def _is_one_file(first: str, second: str) -> bool:
    """Returns True if two names lead to one file: writing answers there would destroy unread requests."""
    return Path(first).exists() and Path(second).exists() and Path(first).samefile(second)


def _num_tokens(body: Any) -> int:
    """Tokens of the output, or those of the input where vectors or scores are the output; 0 for sounds."""
    usage = body.usage
    if not isinstance(usage, (CompletionUsage, RerankUsage)):
        return 0
    return usage.total_tokens - usage.prompt_tokens or usage.prompt_tokens


def max_in_flight(engine: AsyncLLM, batch: BatchConfig) -> int:
    """Most lines in flight: keeps the engine full while answers are written, and fits its queue."""
    limits = engine.config.limits
    wanted = batch.max_in_flight or 2 * limits.max_num_seqs
    if limits.max_num_queued_reqs is None:
        return wanted
    return min(wanted, limits.max_num_seqs + limits.max_num_queued_reqs)
