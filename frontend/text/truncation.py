"""Truncates prompts that are too long, if the request asks for it."""

from typing import Literal, NamedTuple

from quire.core.errors import ParameterError

Side = Literal["left", "right"]


class Truncation(NamedTuple):
    """The most tokens of a prompt to keep; -1 for as many as fit the context.

    `side` is the end that is cut off; None for the tokenizer's default.
    """

    num_tokens: int
    side: Side | None = None

    def apply(self, token_ids: list[int], *, room: int, tokenizer_side: Side) -> list[int]:
        """The part of `token_ids` that is kept.

        Args:
            room: the most tokens of a prompt that leave room for the requested output.

        Raises:
            ParameterError: `num_tokens` is more than `room`.
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
