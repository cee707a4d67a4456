"""The grammars that a frontend has sent to its engine. Each is sent once while unfinished requests use it. The same
holds for files that grammars name, if the engine is on another host."""

from collections import Counter

from msgspec.structs import replace

from quire.core.wire.protocol import EngineRequest


class SentGrammars:
    """Counts the users of each grammar, and tracks which grammars the running engine has. Sends nothing."""

    def __init__(self) -> None:
        self._num_users: Counter[bytes] = Counter()  # by key
        self._sent: set[bytes] = set()
        self._sent_files: set[str] = set()  # by path

    def add_user(self, request: EngineRequest) -> None:
        """Counts `request` as a user of its grammar until `remove_user`."""
        if request.grammar is not None:
            self._num_users[request.grammar.key] += 1

    def without_known(self, request: EngineRequest) -> EngineRequest:
        """`request` without the data of a grammar that the engine has. The caller must send the returned request."""
        grammar = request.grammar
        if grammar is None:
            return request
        if grammar.key in self._sent:
            return replace(request, grammar=replace(grammar, data=b""))
        self._sent.add(grammar.key)
        return request

    def unknown_file(self, request: EngineRequest) -> str | None:
        """Path of the file that an engine on another host needs before `request`. The caller must send it."""
        if request.grammar is None or request.grammar.vocabulary_path in self._sent_files:
            return None
        self._sent_files.add(request.grammar.vocabulary_path)
        return request.grammar.vocabulary_path

    def remove_user(self, request: EngineRequest) -> bytes | None:
        """Counts `request` as finished. Returns its grammar's key if the engine has that grammar and no request uses it
        any more."""
        if request.grammar is None:
            return None
        key = request.grammar.key
        self._num_users[key] -= 1
        if self._num_users[key]:
            return None
        del self._num_users[key]
        if key not in self._sent:
            return None
        self._sent.remove(key)
        return key

    def forget_sent(self) -> None:
        """Counts no grammar and no file as sent, because the engine is gone."""
        self._sent.clear()
        self._sent_files.clear()
