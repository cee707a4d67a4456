"""The helper process: compiles one constraint after another within limits of memory and time, and ends with its parent.

If a client's schema or pattern makes a library hang or crash, only this process is affected: the frontend kills it and
starts another.
"""

import contextlib
import pkgutil
import socket
import zlib
from pathlib import Path

import msgspec

from quire.core.wire.protocol import Vocabulary
from quire.frontend.grammar.backends.backend import Backend, GrammarError
from quire.frontend.grammar.constraint import Constraint
from quire.frontend.grammar.messages import Answer, Compile, Compiled, GrammarRefused, NotStarted, Setup
from quire.frontend.grammar.schema import SchemaError
from quire.frontend.grammar.vocabulary import make_vocabulary
from quire.frontend.helpers.frames import framed, receive
from quire.frontend.helpers.helper_side import is_large, limited, run_helper
from quire.frontend.text.tokenizer import Tokenizer

_BACKENDS = "quire.frontend.grammar.backends."
BACKENDS = {
    "xgrammar": _BACKENDS + "xgrammar_backend:XGrammarBackend",
    "guidance": _BACKENDS + "guidance_backend:GuidanceBackend",
    "outlines": _BACKENDS + "outlines_backend:OutlinesBackend",
    "lm-format-enforcer": _BACKENDS + "lm_format_enforcer_backend:LMFormatEnforcerBackend",
}
"""Import paths by name, because a backend is imported when it is first needed."""


class Compiler:
    """Compiles constraints for one model.

    Args:
        setup: the model's tokenizer and vocabulary, and the limits.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tokenizer = Tokenizer.from_folder(
            Path(setup.tokenizer_folder), setup.tokenizer_mode, setup.trust_remote_code
        )
        self._vocabularies: dict[str, Vocabulary] = {}
        self._backends: dict[tuple[str, str], Backend] = {}

    def prepare(self, question: Compile) -> None:
        """Loads the libraries that the question may need, outside of the limits that apply to its constraint."""
        for backend in question.constraint.backends:
            with contextlib.suppress(GrammarError):  # `answer` reports it
                self._backend(backend, _vocabulary_name(question.constraint))

    def answer(self, question: Compile) -> Answer:
        """The grammar of the first backend that can compile it, or a refusal with the reasons of all backends."""
        constraint = question.constraint
        name = _vocabulary_name(constraint)
        reasons = []
        for backend in constraint.backends:
            try:
                data = self._backend(backend, name).compile(constraint)
            except SchemaError as error:
                return GrammarRefused(f"{error}.")
            except GrammarError as error:
                reasons.append(f"{backend}: {error}")
                continue
            except (KeyError, TypeError, ValueError, AttributeError, StopIteration, IndexError) as error:
                # Errors that a malformed constraint may cause, in a library or in Quire's code.
                reasons.append(f"{backend}: it is malformed ({type(error).__name__}: {str(error)[:200]})")
                continue
            known = name in question.known_vocabularies
            vocabulary = b"" if known else msgspec.msgpack.encode(self._vocabulary(name))
            return Compiled(backend, zlib.compress(data, 1), name, vocabulary, is_large())
        return GrammarRefused("; ".join(reasons) + ".", is_large())

    def _backend(self, backend: str, vocabulary: str) -> Backend:
        key = (backend, vocabulary)
        if key not in self._backends:
            try:
                self._backends[key] = pkgutil.resolve_name(BACKENDS[backend])(self._vocabulary(vocabulary))
            except ImportError as error:
                raise GrammarError(f"it is not installed here ({error}); pip install 'quire[{backend}]'") from None
        return self._backends[key]

    def _vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            setup = self._setup
            self._vocabularies[name] = make_vocabulary(self._tokenizer, name, setup.vocab_size, setup.end_token_ids)
        return self._vocabularies[name]


def _vocabulary_name(constraint: Constraint) -> str:
    """The vocabulary that a constraint needs: only structural tags may contain special tokens."""
    return "all" if constraint.kind == "structural_tag" else "text"


def serve(connection: socket.socket) -> None:
    """Answers questions until the parent closes the socket.

    Raises:
        EOFError: the parent closed the socket.
    """
    setup = receive(connection, Setup)
    assert isinstance(setup, Setup)
    try:
        compiler = Compiler(setup)
    except Exception as error:  # the frontend has read the same files before
        receive(connection, Compile)
        connection.sendall(framed(NotStarted(f"{type(error).__name__}: {error}")))
        return
    while True:
        question = receive(connection, Compile)
        assert isinstance(question, Compile)
        compiler.prepare(question)
        connection.sendall(framed(_answer_within_limits(compiler, question, setup)))


def _answer_within_limits(compiler: Compiler, question: Compile, setup: Setup) -> Answer:
    """The answer; a refusal if the limit of memory or the depth of the stack was exceeded."""
    try:
        with limited(setup.limit_bytes, setup.limit_cpu_seconds):
            return compiler.answer(question)
    except (MemoryError, OSError, RuntimeError):  # from Python, the system or a library; RecursionError is the last
        return GrammarRefused("It is too complex.", is_large=True)


if __name__ == "__main__":
    run_helper(serve)
