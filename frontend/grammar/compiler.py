"""Compiles requests' constraints into grammars, each once, in helper processes, within limits of time and memory."""

import asyncio
import os

import msgspec

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.errors import ParameterError, UnavailableError
from quire.core.logging import get_logger
from quire.core.wire.protocol import Grammar
from quire.core.wire.structured_outputs import ConstraintKind, StructuredOutputsParams
from quire.frontend.grammar.cache import GrammarCache
from quire.frontend.grammar.constraint import Constraint, read_constraint
from quire.frontend.grammar.messages import Answer, Compile, Compiled, GrammarRefused, NotStarted, Setup
from quire.frontend.grammar.vocabulary import PREFIX
from quire.frontend.helpers.helper import Helper, HelperDied, HelperKilled, HelperProgram, OutOfTime
from quire.frontend.helpers.pool import HelperPool
from quire.frontend.keys.caller import current_owner
from quire.frontend.text.tokenizer import Tokenizer

logger = get_logger(__name__)

_HELPER = "quire.frontend.grammar.helper_process"
LIMIT_CPU_SECONDS = 10.0
BACKSTOP_SECONDS = 120.0
RETRY_SECONDS = 10.0
LIMIT_BYTES = 2**30
CACHE_BYTES = 64 * 2**20
MAX_GRAMMAR_BYTES = 16 * 2**20
"""Limit for one compiled grammar, because engine and workers keep it while a request uses it."""


_WORDS: dict[ConstraintKind, str] = {
    "json": "The JSON schema",
    "regex": "The regular expression",
    "choice": "The choice",
    "grammar": "The grammar",
    "json_object": "A JSON object",
    "structural_tag": "The format",  # may be our own, around a client's schema that applies after reasoning
}


def _remedy(constraint: Constraint) -> str:
    if len(constraint.backends) == 1:
        return f"Only the backend {constraint.backends[0]} was tried; the backend auto tries others, too."
    return "Leave out the named part, or write it in another way."


class GrammarCompiler:
    """Compiles and caches one model's grammars. To be used from one event loop.

    Args:
        tokenizer: None if the server has no tokenizer; then every constraint is refused.
        vocab_size: width of the model's logits.
        end_token_ids: tokens that end an output.
        options: the server's defaults.
        limit_cpu_seconds: processor time of one compilation. A helper that exceeds it ends, and the request is refused.
        limit_bytes: memory of one compilation, enforced in the same way.
        backstop_seconds: wall-clock time of one compilation, start of the helper included. A helper that exceeds it got
            too little processor time from the host, so the client may try again.
        cache_bytes: limit of the cache of compiled grammars.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        end_token_ids: list[int],
        options: StructuredOutputsOptions,
        limit_cpu_seconds: float = LIMIT_CPU_SECONDS,
        limit_bytes: int = LIMIT_BYTES,
        backstop_seconds: float = BACKSTOP_SECONDS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = [token_id for token_id in end_token_ids if 0 <= token_id < vocab_size]
        self._options = options
        self._limit_cpu_seconds = limit_cpu_seconds
        self._limit_bytes = limit_bytes
        self._backstop_seconds = backstop_seconds
        self._cache = GrammarCache(cache_bytes)
        self._compiling: dict[bytes, asyncio.Task[Grammar]] = {}
        self._vocabularies: dict[str, int] = {}  # file descriptors by name
        self._pool: HelperPool[Answer] | None = None

    async def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a request.

        Raises:
            ParameterError: no backend can compile the constraint within the limits; `param` names the field.
            UnavailableError: the host is too busy.
        """
        constraint = read_constraint(params, self._options)
        key = constraint.key
        grammar = self._cache.get(key)
        if grammar is not None:
            return grammar
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile(constraint, key))
            task.add_done_callback(lambda done: self._on_compiled(key, done))
        try:
            return await asyncio.shield(task)  # other requests may wait for the same task
        finally:
            del task  # a failed task holds its error, whose traceback leads here

    def _on_compiled(self, key: bytes, task: "asyncio.Task[Grammar]") -> None:
        del self._compiling[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.put(task.result())

    async def _compile(self, constraint: Constraint, key: bytes) -> Grammar:
        field = f"structured_outputs.{constraint.kind}"
        question = Compile(constraint, list(self._vocabularies))
        try:
            answer = await self._ask_helper(question, field)
        except HelperKilled:
            logger.warning("somebody ended the helper that compiled a %s; another one does it", constraint.kind)
            try:
                answer = await self._ask_helper(question, field)
            except HelperKilled:
                raise UnavailableError(
                    f"{_WORDS[constraint.kind]} was not compiled, because somebody twice ended the helper process that "
                    "did it; send the request again later.",
                    retry_after_seconds=RETRY_SECONDS,
                ) from None
        if isinstance(answer, GrammarRefused):
            message = f"{_WORDS[constraint.kind]} cannot be followed: {answer.message} {_remedy(constraint)}"
            raise ParameterError(message, param=field)
        if len(answer.data) > MAX_GRAMMAR_BYTES:
            raise ParameterError(
                f"{_WORDS[constraint.kind]} compiles to {len(answer.data)} bytes, over the limit of "
                f"{MAX_GRAMMAR_BYTES}; make it smaller, for instance by lower maxItems and maxLength.",
                param=field,
            )
        return Grammar(answer.backend, key, answer.data, self._vocabulary_path(answer))

    async def _ask_helper(self, question: Compile, field: str) -> Compiled | GrammarRefused:
        """Asks a helper of the pool, and ends it if it has become large."""
        async with self._helpers().helper(len(question.constraint.text), current_owner()) as helper:
            answer = await self._ask(helper, question, field)
            if isinstance(answer, NotStarted):
                helper.kill()
                logger.error("a helper that compiles constraints cannot read the tokenizer: %s", answer.reason)
                raise UnavailableError(
                    f"{_WORDS[question.constraint.kind]} was not compiled, because the server can no longer read the "
                    "model's tokenizer. Its log tells more.",
                    retry_after_seconds=RETRY_SECONDS,
                )
            if answer.is_large:
                helper.kill()
        return answer

    async def _ask(self, helper: Helper[Answer], question: Compile, field: str) -> Answer:
        kind = question.constraint.kind
        try:
            async with asyncio.timeout(self._backstop_seconds):
                return await helper.ask(question)
        except TimeoutError:
            logger.warning(
                "the host gave a helper that compiled a %s too little processor time in %g s; the helper was ended",
                kind,
                self._backstop_seconds,
            )
            raise UnavailableError(
                f"{_WORDS[kind]} was not compiled within {self._backstop_seconds:g} s, because the server's host is "
                "too busy; send the request again later.",
                retry_after_seconds=RETRY_SECONDS,
            ) from None
        except OutOfTime:
            logger.warning("a %s took more than %g s of processor time to compile", kind, self._limit_cpu_seconds)
            message = (
                f"{_WORDS[kind]} takes more than {self._limit_cpu_seconds:g} s of processor time to compile; "
                "make it simpler."
            )
        except HelperKilled:
            raise
        except HelperDied:
            logger.warning("a %s ended the helper that compiled it", kind)
            message = f"{_WORDS[kind]} takes more than {self._limit_bytes} bytes of memory to compile; make it simpler."
        raise ParameterError(message, param=field) from None

    def _helpers(self) -> HelperPool[Answer]:
        if self._pool is None:
            if self._tokenizer is None:
                raise ParameterError(
                    "structured_outputs needs a tokenizer, and this server runs with --skip-tokenizer-init.",
                    param="structured_outputs",
                )
            if self._tokenizer.kind == "rewritten":
                raise ParameterError(
                    "structured_outputs needs the bytes of each token, and tokens of this model's tokenizer, which is "
                    "code in Python, change the text before them; leave it out.",
                    param="structured_outputs",
                )
            if not self._end_token_ids:
                raise ParameterError(
                    "structured_outputs needs an end-of-sequence token, and this model has none: name it in "
                    "--hf-overrides '{\"eos_token_id\": ...}'.",
                    param="structured_outputs",
                )
            setup = Setup(
                str(self._tokenizer.folder),
                self._vocab_size,
                self._end_token_ids,
                self._limit_bytes,
                self._limit_cpu_seconds,
                self._tokenizer.mode,
                self._tokenizer.trust_remote_code,
            )
            self._pool = HelperPool(HelperProgram(_HELPER, setup, msgspec.msgpack.Decoder(Answer)))
        return self._pool

    def _vocabulary_path(self, answer: Compiled) -> str:
        """Path of a memory file with the vocabulary, which exists as long as this process."""
        name = answer.vocabulary_name
        if name not in self._vocabularies:
            descriptor = os.memfd_create(f"{PREFIX}{name}")
            with open(descriptor, "wb", closefd=False) as file:
                file.write(answer.vocabulary)
            self._vocabularies[name] = descriptor
        return f"/proc/{os.getpid()}/fd/{self._vocabularies[name]}"

    @property
    def helper_pids(self) -> list[int]:
        """Process ids of the helpers, busy or idle."""
        return self._pool.pids if self._pool is not None else []

    def close(self) -> None:
        """Ends the helpers. Grammars that `compile` returned stay usable until this process ends."""
        if self._pool is not None:
            self._pool.close()
