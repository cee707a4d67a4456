"""Writes two texts whose score is wanted as one prompt, for models that read both at once."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ConfigError, ParameterError
from quire.frontend.requests.async_tokenizer import INLINE_CHARACTERS, AsyncTokenizer
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import Prompt
from quire.frontend.text.chat_templates import ChatTemplates
from quire.frontend.text.pairs import PairLimits, text_of_tokens
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.truncation import AddedTokens, Truncation

_RESERVED = {"chat_template", "tools", "tokenize"}
_SWITCHES = ("add_generation_prompt", "continue_final_message")
"""Variables of a template that are off unless they are given."""


class Sides(NamedTuple):
    """The texts on either side of pairs: one and one, one and many, or as many; and the client's names of the two."""

    first: list[str]
    second: list[str]
    names: tuple[str, str]


class PairOptions(Struct, frozen=True):
    """How pairs are written.

    Attributes:
        first_limit, second_limit: most tokens of either text; None: all.
        truncation: of the whole; None refuses what is too long.
        variables: of the template.
        use_activation: make a probability of a score; None: as the model says.
    """

    first_limit: int | None = None
    second_limit: int | None = None
    truncation: Truncation | None = None
    variables: dict[str, Any] = {}
    use_activation: bool | None = None


class PairTemplate(Struct, frozen=True):
    """Writes a message of the role `query` and one of the role `document`: Jinja text, or the name of a template of the
    checkpoint; and variables, which a request's own come before."""

    source: str
    variables: dict[str, Any] = {}


class PairWriter:
    """Writes pairs for one model.

    Args:
        spec: how the model makes scores.
        template: the text of the template that writes pairs; None: the one that the checkpoint names for them, if any,
            or else the tokenizer joins the texts in its own way.
        limit: tokens that a prompt may have.
        num_token_types: segments that the model tells apart; with one, it gets none.

    Raises:
        ConfigError: the checkpoint names a template that it does not have.
    """

    def __init__(
        self,
        tokenizer: AsyncTokenizer,
        templates: ChatTemplates,
        spec: PoolingSpec | None,
        *,
        template: str | None,
        limit: ContextLimit,
        num_token_types: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._template = _saved_template(spec, templates) if template is None else PairTemplate(template)
        self._joins_texts = spec is not None and spec.joins_texts
        self._limit = limit
        self._has_types = num_token_types > 1

    async def write(
        self,
        pairs: Sequence[tuple[str, str]],
        options: PairOptions = PairOptions(),
        names: tuple[str, str] = ("queries", "documents"),
        *,
        checks_lengths: bool = True,
    ) -> list[Prompt]:
        """The prompts of pairs, one each.

        Args:
            names: those of either side, for errors.
            checks_lengths: refuse a pair that is too long, by the text that is.

        Raises:
            ParameterError: a text is too long, a limit is out of range, or the template refuses a pair.
        """
        is_cut = (options.truncation, options.first_limit, options.second_limit) != (None, None, None)
        for name, text in _named_texts(pairs, names):
            await self._tokenizer.check_length(text, name, must_fit=checks_lengths and not is_cut)
        self._check_limit(options.first_limit, "max_tokens_per_query")
        self._check_limit(options.second_limit, "max_tokens_per_doc")
        spelled = self._tokenizer.spelled
        pairs = [(spelled(first), spelled(second)) for first, second in pairs]
        work = functools.partial(self._write, pairs, options)
        is_long = sum(len(text) for pair in pairs for text in pair) > INLINE_CHARACTERS
        prompts = await self._tokenizer.in_thread(work) if is_long else work()
        if checks_lengths:
            self._check_lengths(prompts, pairs, options, names)
        return prompts

    async def shorten(self, texts: Sequence[str], limit: int | None, field: str) -> list[str]:
        """The first `limit` tokens of each text, as text.

        Args:
            field: the name of the limit, for errors.

        Raises:
            ParameterError: a text is far too long, or the limit is out of range.
        """
        self._check_limit(limit, field)
        if limit is None:
            return list(texts)
        for text in texts:
            await self._tokenizer.check_length(text, must_fit=False)
        tokenizer = self._tokenizer.tokenizer
        return await self._tokenizer.in_thread(lambda: [_shortened(tokenizer, text, limit, field) for text in texts])

    def _check_limit(self, limit: int | None, field: str) -> None:
        if limit is not None and not 0 < limit < self._limit.max_model_len:
            raise ParameterError(
                f"{field} must be from 1 to {self._limit.max_model_len - 1}, or 0 for no limit; got {limit}.",
                param=field,
            )

    def _write(self, pairs: Sequence[tuple[str, str]], options: PairOptions) -> list[Prompt]:
        by_tokenizer = self._template is None and not self._joins_texts
        return self._by_tokenizer(pairs, options) if by_tokenizer else self._by_text(pairs, options)

    def _check_lengths(
        self, prompts: Sequence[Prompt], pairs: Sequence[tuple[str, str]], options: PairOptions, names: tuple[str, str]
    ) -> None:
        """Refuses a pair that is too long: for its first text, if no second one would fit beside it."""
        longest = self._limit.longest_prompt
        found = (index for index, prompt in enumerate(prompts) if len(prompt.token_ids) > longest)
        index = next(found, None)
        if index is None:
            return
        [alone] = self._write([(pairs[index][0], "")], options)
        side, count = (
            (0, len(alone.token_ids)) if len(alone.token_ids) > longest else (1, len(prompts[index].token_ids))
        )
        texts = [pair[side] for pair in pairs]
        param = next(name for name, text in _named_side(texts, names[side]) if text == texts[index])
        alone_too = " without any text beside it" if side == 0 else ""
        raise ParameterError(
            f"{param} makes a prompt of {count} tokens{alone_too}, but {self._limit.rule}; shorten it.", param=param
        )

    def _by_tokenizer(self, pairs: Sequence[tuple[str, str]], options: PairOptions) -> list[Prompt]:
        cut, room, rule = options.truncation, self._limit.max_model_len, self._limit.room_rule
        whole = None
        if cut is not None and cut.side is None:
            whole = cut.limit(room=room, rule=rule)
        limits = PairLimits(options.first_limit, options.second_limit, whole)
        found = self._tokenizer.tokenizer.encode_pairs(pairs, limits.cut)
        if cut is not None:
            found = [each.part(functools.partial(cut.apply, room=room, rule=rule)) for each in found]
        return [
            Prompt(None, each.token_ids, token_type_ids=each.second_text_types if self._has_types else None)
            for each in found
        ]

    def _by_text(self, pairs: Sequence[tuple[str, str]], options: PairOptions) -> list[Prompt]:
        tokenizer = self._tokenizer.tokenizer
        texts = [
            self._written(
                _shortened(tokenizer, first, options.first_limit, "max_tokens_per_query"),
                _shortened(tokenizer, second, options.second_limit, "max_tokens_per_doc"),
                options.variables,
            )
            for first, second in pairs
        ]
        rows = tokenizer.encode_batch(texts)
        if options.truncation is not None:
            alone, room, rule = tokenizer.encode(""), self._limit.max_model_len, self._limit.room_rule
            cut = functools.partial(options.truncation.apply, room=room, rule=rule)
            rows = [cut(row, added=AddedTokens.of(row, alone)) for row in rows]
        return [Prompt(text, row) for text, row in zip(texts, rows, strict=True)]

    def _written(self, first: str, second: str, variables: dict[str, Any]) -> str:
        if self._template is None:
            return first + second
        if wrong := _RESERVED & variables.keys():
            raise ParameterError(
                f"chat_template_kwargs must not have {sorted(wrong)[0]!r}, which the server sets.",
                param="chat_template_kwargs",
            )
        variables = self._template.variables | variables
        return self._templates.render(
            [{"role": "query", "content": first}, {"role": "document", "content": second}],
            add_generation_prompt=bool(variables.get("add_generation_prompt")),
            continue_final_message=bool(variables.get("continue_final_message")),
            chat_template=self._template.source,
            chat_template_kwargs={name: value for name, value in variables.items() if name not in _SWITCHES},
        )


def _named_texts(pairs: Sequence[tuple[str, str]], names: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Each text once, with its client's name, which has a number where its side has several texts."""
    for side, name in zip(zip(*pairs, strict=True), names, strict=False):
        yield from _named_side(side, name)


def _named_side(texts: Sequence[str], name: str) -> Iterator[tuple[str, str]]:
    first = {text: index for index, text in reversed([*enumerate(texts)])}
    for text, index in first.items():
        yield (name if len(first) == 1 else f"{name}[{index}]"), text


def _saved_template(spec: PoolingSpec | None, templates: ChatTemplates) -> PairTemplate | None:
    """The template that the checkpoint names for pairs."""
    if spec is None or spec.pair_template is None:
        return None
    if templates.lacks(spec.pair_template):
        raise ConfigError(
            f"The files of sentence-transformers say that the chat template {spec.pair_template!r} writes pairs, and "
            "the checkpoint has no such template; give it with --chat-template."
        )
    return PairTemplate(spec.pair_template, spec.template_variables)


def _shortened(tokenizer: Tokenizer, text: str, limit: int | None, field: str) -> str:
    """The part of a text that has at most `limit` tokens.

    Raises:
        ParameterError: the tokenizer does not know the places of tokens.
    """
    if limit is None or not text:
        return text
    try:
        return text_of_tokens(text, tokenizer.offsets(text, add_special_tokens=False), limit)
    except ParameterError as error:
        if error.param != "return_token_offsets":
            raise
        raise ParameterError(
            f"{field} needs the places of tokens in a text, which this model's tokenizer, code in Python, does not "
            "have; shorten the texts, or use truncate_prompt_tokens.",
            param=field,
        ) from None
