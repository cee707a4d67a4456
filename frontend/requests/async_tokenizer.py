"""A tokenizer for the event loop: long texts are tokenized in a thread, texts that are far too long are refused."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.core.errors import ParameterError
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.text.tokenizer import Tokenizer, needed
from quire.frontend.text.truncation import AddedTokens

T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Longer texts are tokenized in a thread. This length takes about a millisecond; shorter texts cost less."""

LARGE_CHARACTERS = 2**18
"""Longer texts are tokenized in another thread, so that shorter ones need not wait for them."""

MAX_CHARACTERS_PER_TOKEN = 16
LEAST_TEXT_LIMIT = 2**20
"""A text is refused when it is longer than both this limit and the context's length in characters. Prose, code and data
have far fewer characters a token on average. A tokenizer cannot be interrupted. It takes up to two microseconds and
400 bytes a character, in the worst case of a text of spaces, where each space is a piece by itself."""


class AsyncTokenizer:
    """A tokenizer for an event loop.

    Args:
        tokenizer: None when the server runs on token ids alone.
        limit: the length of the model's context.
        lower_case: read texts in lower case, for a model that was trained so.
    """

    def __init__(self, tokenizer: Tokenizer | None, limit: ContextLimit, *, lower_case: bool = False) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._lower_case = lower_case
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._large_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")

    def close(self) -> None:
        """Ends the threads."""
        for thread in (self._thread, self._large_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_there(self) -> bool:
        """False when the server runs without a tokenizer, on token ids alone."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself. Raises ParameterError when the server runs without one."""
        return needed(self._tokenizer)

    def added_tokens(self, token_ids: Sequence[int]) -> AddedTokens:
        """The special tokens among a text's `token_ids` that the tokenizer has added."""
        return AddedTokens.of(token_ids, self.tokenizer.encode(""))

    def padded(self, token_ids: list[int], length: int) -> list[int]:
        """Token ids that are filled up to a length with padding. Raises ParameterError if there is no token for it."""
        missing = length - len(token_ids)
        if missing <= 0:
            return token_ids
        token = self.tokenizer.special_tokens.get("pad_token")
        token_id = None if token is None else self.tokenizer.token_id(token)
        if token_id is None:
            raise ParameterError("This model's tokenizer has no padding token; leave padding out.", param="padding")
        return token_ids + [token_id] * missing

    def spelled(self, text: str) -> str:
        """A text as the model reads it, which may be in lower case."""
        return text.lower() if self._lower_case else text

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = True) -> list[int]:
        """Token ids of a text; a thread tokenizes a long one. A text slightly longer than the context is tokenized too.

        Args:
            must_fit: as for `check_length`.

        Raises:
            ParameterError: the text is far too long, or not valid Unicode.
        """
        text = self.spelled(text)
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        await self.check_length(text, must_fit=must_fit)
        thread = self._thread if len(text) <= LARGE_CHARACTERS else self._large_thread
        [token_ids] = await self._tokenize_in(thread, [text], add_special_tokens)
        return token_ids

    async def tokenize_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, on all cores; of a few short ones, at once."""
        texts = [self.spelled(text) for text in texts] if self._lower_case else texts
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return await self._tokenize_in(self._thread, texts, add_special_tokens)

    async def _tokenize_in(
        self, thread: ThreadPoolExecutor, texts: list[str], add_special_tokens: bool
    ) -> list[list[int]]:
        encode = functools.partial(self.tokenizer.encode_batch, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(thread, encode, texts)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work`, another slow step of reading a prompt, in the tokenizer's thread; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def max_text_length(self) -> int:
        """The most characters that are tokenized at once, and the most token ids that are detokenized at once."""
        return max(LEAST_TEXT_LIMIT, MAX_CHARACTERS_PER_TOKEN * self._limit.max_model_len)

    async def check_length(self, text: str, param: str = "prompt", *, must_fit: bool = True) -> None:
        """Refuses a text that is far too long, before it is tokenized.

        Args:
            must_fit: refuse a text that exceeds the context with any tokens; False for one that will be cut.

        Raises:
            ParameterError: the text is too long; `param` names the field.
        """
        num_characters, longest = len(text), self._limit.longest_prompt
        if must_fit and num_characters > longest:
            least = await asyncio.to_thread(self.tokenizer.least_tokens, text)
            if least > longest:
                raise ParameterError(
                    f"{param} has {num_characters} characters, which are at least {least} tokens; {self._limit.rule}; "
                    "shorten it.",
                    param=param,
                )
        if num_characters > self.max_text_length:
            raise ParameterError(
                f"{param} has {num_characters} characters; at most {self.max_text_length} are tokenized where "
                f"max_model_len is {self._limit.max_model_len}; shorten it.",
                param=param,
            )
