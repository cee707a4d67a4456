"""Fill-in-the-middle prompts: the texts before and after a gap, in a model's own order and between its own tokens."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from quire.core.errors import ParameterError
from quire.frontend.text.tokenizer import Tokenizer

Part = Literal["before", "after"] | str
BEFORE: Part = "before"
AFTER: Part = "after"


class Format(NamedTuple):
    """One model family's format: special tokens, with `BEFORE` and `AFTER` in the places of the two texts."""

    parts: tuple[Part, ...]

    @property
    def tokens(self) -> list[str]:
        return [part for part in self.parts if part not in (BEFORE, AFTER)]


FORMATS = (
    # Qwen2.5-Coder, CodeGemma
    Format(("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>")),
    # StarCoder, Granite Code
    Format(("<fim_prefix>", BEFORE, "<fim_suffix>", AFTER, "<fim_middle>")),
    # SantaCoder
    Format(("<fim-prefix>", BEFORE, "<fim-suffix>", AFTER, "<fim-middle>")),
    # DeepSeek-Coder
    Format(
        ("<\uff5cfim\u2581begin\uff5c>", BEFORE, "<\uff5cfim\u2581hole\uff5c>", AFTER, "<\uff5cfim\u2581end\uff5c>")
    ),
    # Seed-Coder
    Format(("<[fim-suffix]>", AFTER, "<[fim-prefix]>", BEFORE, "<[fim-middle]>")),
    # Code Llama
    Format(("\u2581<PRE>", BEFORE, "\u2581<SUF>", AFTER, "\u2581<MID>")),
    Format(("<PRE>", BEFORE, "<SUF>", AFTER, "<MID>")),
    # Codestral
    Format(("[SUFFIX]", AFTER, "[PREFIX]", BEFORE)),
)
"""A model's format is the first one whose tokens are all in the vocabulary."""


def find_format(tokenizer: Tokenizer) -> Format | None:
    """The format whose tokens the tokenizer has; None if there is none."""
    for each in FORMATS:
        if all(tokenizer.token_id(token) is not None for token in each.tokens):
            return each
    return None


def fill_in_middle(
    tokenizer: Tokenizer, before: str | Sequence[int], after: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of the prompt whose continuation is the text between `before` and `after`.

    Raises:
        ParameterError: the tokenizer has no fill-in-the-middle tokens.
    """
    chosen = find_format(tokenizer)
    if chosen is None:
        raise ParameterError(
            "suffix needs a model whose tokenizer has fill-in-the-middle tokens (such as <|fim_prefix|>, "
            "<|fim_suffix|> and <|fim_middle|>), and this one's has none; leave it out.",
            param="suffix",
        )
    token_ids = []
    bos = tokenizer.bos_token_id
    if add_special_tokens and bos is not None and tokenizer.encode("")[:1] == [bos]:
        token_ids.append(bos)
    for part in chosen.parts:
        if part == AFTER:
            token_ids += tokenizer.encode(after, add_special_tokens=False)
        elif part == BEFORE:
            token_ids += tokenizer.encode(before, add_special_tokens=False) if isinstance(before, str) else before
        else:
            token_id = tokenizer.token_id(part)
            assert token_id is not None
            token_ids.append(token_id)
    return token_ids
