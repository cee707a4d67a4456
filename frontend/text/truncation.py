"""Cutting prompts that are too long, where a request asks for it."""

from typing import Literal, NamedTuple

from quire.core.errors import ParameterError

Side = Literal["left", "right"]


class Truncation(NamedTuple):
    """How much of a prompt is kept: that many tokens, or with -1 as many as the context has room for.

    `side` is the end that is cut off; None leaves it to the tokenizer.
    """

    num_tokens: int
    side: Side | None = None

    def apply(self, token_ids: list[int], *, room: int, tokenizer_side: Side) -> list[int]:
        """`token_ids`, or the part of them that is kept.

        Args:
            room: the longest prompt that leaves place for the output asked for, in tokens.

        Raises:
            ParameterError: more is to be kept than there is room for.
        """
        limit = room if self.num_tokens == -1 else self.num_tokens
        if limit > room or limit < 1:
            raise ParameterError(
                f"truncate_prompt_tokens must be -1, or from 1 to the {room} tokens that max_model_len and max_tokens "
                f"leave for the prompt; got {self.num_tokens}.",
                param="truncate_prompt_tokens",
            )
        if len(token_ids) <= limit:
            return token_ids
        return token_ids[-limit:] if (self.side or tokenizer_side) == "left" else token_ids[:limit]
