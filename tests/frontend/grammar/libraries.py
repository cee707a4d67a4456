"""What each grammar library accepts, token by token, with bytes for tokens."""

import pkgutil
from functools import cache
from typing import Any

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.wire.protocol import Vocabulary
from quire.core.wire.structured_outputs import GrammarBackend, StructuredOutputsParams
from quire.executor.sampling.grammar.library import LOADERS
from quire.executor.sampling.grammar.matcher import Loader
from quire.frontend.grammar.backends.backend import Backend
from quire.frontend.grammar.constraint import read_constraint
from quire.frontend.grammar.helper_process import BACKENDS

END = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [END])


@cache
def library_and_loader(backend: GrammarBackend) -> tuple[Backend, Loader]:
    """Both halves of a library, the frontend's and the worker's."""
    return pkgutil.resolve_name(BACKENDS[backend])(BYTES), pkgutil.resolve_name(LOADERS[backend])(BYTES)


class Grammar:
    """A constraint compiled by one library."""

    def __init__(self, backend: GrammarBackend, **constraint: Any) -> None:
        read = read_constraint(StructuredOutputsParams(backend=backend, **constraint), StructuredOutputsOptions())
        library, self._loader = library_and_loader(backend)
        self._loaded = self._loader.load(library.compile(read))

    def accepts(self, text: str | bytes) -> bool:
        """True if the text is an output from its first to its last byte."""
        matcher = self._loader.matcher(self._loaded)
        encoded = text.encode() if isinstance(text, str) else text
        return all(matcher.accept(token_id) for token_id in [*encoded, END])
