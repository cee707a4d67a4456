"""Loads the grammars of requests: each library once, and each grammar once while it is in use."""

import pkgutil
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.core.wire.protocol import Grammar, Vocabulary
from quire.executor.sampling.grammar.matcher import Loader, Matcher

_MATCHERS = "quire.executor.sampling.grammar."
LOADERS = {
    "xgrammar": _MATCHERS + "xgrammar_matcher:XGrammarLoader",
    "guidance": _MATCHERS + "guidance_matcher:GuidanceLoader",
    "outlines": _MATCHERS + "outlines_matcher:OutlinesLoader",
    "lm-format-enforcer": _MATCHERS + "lm_format_enforcer_matcher:LMFormatEnforcerLoader",
}
"""The loaders by name, because importing a library takes a tenth of a second, which only requests with a grammar need.
"""

_CACHE_BYTES = 256 * 2**20
_MAX_LOADERS = 8


class GrammarLibrary:
    """Loads grammars and builds matchers, for one thread.

    Args:
        cache_bytes: the limit of unused loaded grammars, counted by the size of their data.
    """

    def __init__(self, cache_bytes: int = _CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._loaders: OrderedDict[tuple[str, str], Loader] = OrderedDict()
        self._pieces: dict[str, Sequence[bytes]] = {}  # by the vocabulary's path
        self._grammars: OrderedDict[bytes, tuple[object, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_grammars(self) -> int:
        """The number of loaded grammars."""
        return len(self._grammars)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of `grammar`."""
        loader = self._loader(grammar)
        return loader.matcher(self._load(loader, grammar))

    def pieces(self, grammar: Grammar) -> Sequence[bytes]:
        """The text of each token of the grammar's vocabulary."""
        self._loader(grammar)
        return self._pieces[grammar.vocabulary_path]

    def _loader(self, grammar: Grammar) -> Loader:
        key = (grammar.backend, grammar.vocabulary_path)
        loader = self._loaders.get(key)
        if loader is None:
            data = Path(grammar.vocabulary_path).read_bytes()
            vocabulary = msgspec.msgpack.decode(data, type=Vocabulary)
            self._pieces[grammar.vocabulary_path] = vocabulary.tokens
            loader = self._loaders[key] = pkgutil.resolve_name(LOADERS[grammar.backend])(vocabulary)
            if len(self._loaders) > _MAX_LOADERS:
                self._loaders.popitem(last=False)
        self._loaders.move_to_end(key)
        return loader

    def _load(self, loader: Loader, grammar: Grammar) -> object:
        known = self._grammars.get(grammar.key)
        if known is not None:
            self._grammars.move_to_end(grammar.key)
            return known[0]
        data = zlib.decompress(grammar.data)
        loaded = loader.load(data)
        self._grammars[grammar.key] = loaded, len(data)
        self._num_bytes += len(data)
        while self._num_bytes > self._cache_bytes and len(self._grammars) > 1:
            _, (_, num_bytes) = self._grammars.popitem(last=False)
            self._num_bytes -= num_bytes
        return loaded
