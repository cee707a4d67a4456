"""The messages between the frontend and a helper process that compiles grammars."""

from msgspec import Struct

from quire.core.config.model import TokenizerMode
from quire.frontend.grammar.constraint import Constraint


class Setup(Struct, array_like=True, tag="setup"):
    """The first message: the model's tokens, and a compilation's limits of memory and processor time."""

    tokenizer_folder: str
    vocab_size: int
    end_token_ids: list[int]
    limit_bytes: int
    limit_cpu_seconds: float
    tokenizer_mode: TokenizerMode = "auto"
    trust_remote_code: bool = False


class Compile(Struct, array_like=True, tag="compile"):
    """A constraint to compile. The answer is `Compiled`, `GrammarRefused` or `NotStarted`."""

    constraint: Constraint
    known_vocabularies: list[str]  # names of vocabularies that the frontend has already


class Compiled(Struct, array_like=True, tag="compiled"):
    """A grammar, and the vocabulary that it was compiled for."""

    backend: str
    data: bytes
    vocabulary_name: str
    vocabulary: bytes  # an encoded `protocol.Vocabulary`; empty if the frontend has it already
    is_large: bool  # the helper uses much memory, and should be replaced


class GrammarRefused(Struct, array_like=True, tag="refused"):
    """No backend could compile the constraint; `message` gives the client the reasons."""

    message: str
    is_large: bool = False


class NotStarted(Struct, array_like=True, tag="not_started"):
    """The helper could not read the tokenizer, as when its files have gone; the helper ends."""

    reason: str


Question = Setup | Compile
Answer = Compiled | GrammarRefused | NotStarted
