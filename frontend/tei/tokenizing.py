"""Texts as tokens, and token ids as texts, in the form of Text Embeddings Inference."""

import itertools
from collections.abc import Iterator, Sequence

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.pooling.fields import MAX_INPUTS
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.tei.answers import Token
from quire.frontend.tei.errors import EmptyInputError, TooMuchError
from quire.frontend.tei.schema import DecodeRequest, TokenizeRequest
from quire.frontend.tei.service import with_prompt
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.truncation import AddedTokens


class Tokenizing:
    """Answers the requests. Errors are RequestError."""

    def __init__(self, engine: AsyncLLM, services: PoolingServices) -> None:
        self._services = services
        self._tokenizer = engine.async_tokenizer

    async def tokenize(self, request: TokenizeRequest) -> list[list[Token]]:
        """The tokens of each text."""
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        _check_number(texts, "inputs")
        if request.prompt_name is not None:
            given, _ = with_prompt(self._services, texts, request.prompt_name)
            texts = [str(text) for text in given]
        for text in texts:
            await self._tokenizer.check_length(text, "inputs", must_fit=False)
        special, tokenizer = request.add_special_tokens is not False, self._tokenizer.tokenizer
        spelled = [self._tokenizer.spelled(text) for text in texts]
        return await self._tokenizer.in_thread(lambda: [_tokens(tokenizer, text, special) for text in spelled])

    async def decode(self, request: DecodeRequest) -> list[str]:
        """The text of each list of token ids."""
        rows = request.rows()
        _check_number(rows, "ids")
        longest = self._tokenizer.max_text_length
        if sum(map(len, rows)) > longest:
            raise TooMuchError(
                f"ids holds {sum(map(len, rows))} ids; at most {longest} are made text of at once.", param="ids"
            )
        skips, tokenizer = request.skip_special_tokens is not False, self._tokenizer.tokenizer
        return await self._tokenizer.in_thread(lambda: _decoded(tokenizer, rows, skips))


def _tokens(tokenizer: Tokenizer, text: str, special: bool) -> list[Token]:
    """The tokens of a text; their places are those of the bytes of its UTF-8."""
    ids = tokenizer.encode(text, add_special_tokens=special)
    added = AddedTokens.of(ids, tokenizer.encode("")) if special else AddedTokens()
    end = len(ids) - added.behind
    try:
        places = list(_byte_places(text, tokenizer.offsets(text, add_special_tokens=special)))
    except ParameterError as error:
        if error.param != "return_token_offsets":
            raise
        places = []  # the tokenizer, code in Python, does not know them
    found = []
    for index, token_id in enumerate(ids):
        if not added.before <= index < end:
            found.append(Token(id=token_id, text=tokenizer.token(token_id) or "", special=True))
        elif not places:
            found.append(Token(id=token_id, text=tokenizer.token_text(token_id), special=False))
        else:
            start, stop, part = places[index]
            found.append(Token(id=token_id, text=part, special=False, start=start, stop=stop))
    return found


def _byte_places(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    """The begin and the end of each token in bytes, and its text."""
    starts = [0, *itertools.accumulate(len(character.encode()) for character in text)]
    for start, stop in offsets:
        yield starts[start], starts[stop], text[start:stop]


def _decoded(tokenizer: Tokenizer, rows: Sequence[Sequence[int]], skips: bool) -> list[str]:
    for token_id in itertools.chain.from_iterable(rows):
        if tokenizer.token(token_id) is None:
            raise ParameterError(f"ids holds {token_id}, which the tokenizer does not know.", param="ids")
    return tokenizer.decode_batch(rows, skip_special_tokens=skips)


def _check_number(given: Sequence[object], name: str) -> None:
    if not given:
        raise EmptyInputError(f"{name} must not be empty.", param=name)
    if len(given) > MAX_INPUTS:
        raise TooMuchError(f"{name} has {len(given)} entries, and one request may have {MAX_INPUTS}.", param=name)
