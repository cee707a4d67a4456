"""What every dataset yields."""

from typing import Protocol

from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.text.tokenizer import Tokenizer


class BenchRequest(Struct):
    """One request to send; `prompt` is empty where token ids are sent as they are."""

    prompt_token_ids: list[int]
    output_len: int
    prompt: str = ""


class Vocabulary(Struct):
    """Which ids there are, and what they mean if that is known."""

    size: int
    tokenizer: Tokenizer | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("Prompts from a file need the tokenizer: leave out --skip-tokenizer-init.")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


class Dataset(Protocol):
    """A source of requests, configured by its own flags."""

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        """`num_prompts` requests, the same for the same seed; fewer where the source has no more.

        Raises:
            ConfigError: a flag or the file cannot be used.
        """


def write_as_text(request: BenchRequest, tokenizer: Tokenizer) -> None:
    """Sets `prompt` to a text that tokenizes to about as many ids as there are now, and the ids to those.

    Random ids decoded to text rarely tokenize back to as many; cutting to length and decoding again settles it.
    """
    length = len(request.prompt_token_ids)
    for _ in range(3):
        request.prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        token_ids = tokenizer.encode(request.prompt, add_special_tokens=False)
        if len(token_ids) == length:
            break
        request.prompt_token_ids = token_ids[:length]
    request.prompt_token_ids = token_ids
