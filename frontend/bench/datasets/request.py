"""The request of a benchmark, and the interface of datasets."""

from typing import Any, Protocol

from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.text.tokenizer import Tokenizer


class Sound(Struct, frozen=True):
    """A sound file to send, and what is said in it; None: nobody knows."""

    name: str
    data: bytes
    num_seconds: float
    text: str | None


class BenchRequest(Struct):
    """One request to send; `prompt` is empty if the token ids are sent."""

    prompt_token_ids: list[int]
    output_len: int
    prompt: str = ""
    texts: list[str] = []  # of a request with several; then there is no `prompt`
    parts: list[dict[str, Any]] = []  # images and videos beside the prompt, as parts of a chat message
    sound: Sound | None = None

    @property
    def has_media(self) -> bool:
        """True if there is more than text; then the server alone knows how many tokens the prompt has."""
        return bool(self.parts) or self.sound is not None


class Vocabulary(Struct):
    """The token ids 0 to `size` - 1, and their tokenizer if there is one."""

    size: int
    tokenizer: Tokenizer | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("Prompts from a file need the tokenizer: leave out --skip-tokenizer-init.")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


class Dataset(Protocol):
    """A source of requests, configured by its own flags."""

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        """Returns `num_prompts` requests, the same for the same seed; fewer if the source has no more.

        Raises:
            ConfigError: a flag or the file cannot be used.
        """


def write_as_text(request: BenchRequest, tokenizer: Tokenizer) -> None:
    """Sets `prompt` to a text with about as many tokens as the request has, and the ids to that text's tokens.

    The text of random ids rarely has the same number of tokens. Truncating its tokens and decoding again corrects that.
    """
    length = len(request.prompt_token_ids)
    for _ in range(3):
        request.prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        token_ids = tokenizer.encode(request.prompt, add_special_tokens=False)
        if len(token_ids) == length:
            break
        request.prompt_token_ids = token_ids[:length]
    request.prompt_token_ids = token_ids
