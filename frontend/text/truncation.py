"""Truncates prompts that are too long, if the request asks for it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from quire.core.errors import ParameterError

Side = Literal["left", "right"]
T = TypeVar("T")

_NAME = "truncate_prompt_tokens"


class AddedTokens(NamedTuple):
    """How many tokens of a prompt a tokenizer has put before and behind the text's own."""

    before: int = 0
    behind: int = 0

    @classmethod
    def of(cls, token_ids: Sequence[int], alone: Sequence[int]) -> "AddedTokens":
        """Those of `token_ids`.

        Args:
            alone: the ids that the tokenizer makes of an empty text.
        """
        before = 0
        while before < len(alone) and token_ids[before : before + 1] == alone[before : before + 1]:
            before += 1
        behind = alone[before:]
        return cls(before, len(behind)) if token_ids[len(token_ids) - len(behind) :] == behind else cls()


class Truncation(NamedTuple):
    """The maximum number of a prompt's tokens; -1 keeps what fits the context. `name` is the client's name of it.

    `side` is the end that is cut off. Without it, the end `text_side` of the text is cut off, and the tokens that the
    tokenizer adds stay, as in vLLM and the `tokenizers` library. With it, added tokens are cut off like others.
    """

    num_tokens: int
    side: Side | None = None
    text_side: Side = "left"
    name: str = _NAME

    def limit(self, *, room: int, rule: str) -> int:
        """The most tokens to keep.

        Args:
            room: the most tokens of a prompt that leave room for the requested output.
            rule: what `room` is, for messages.

        Raises:
            ParameterError: `num_tokens` is more than `room`.
        """
        limit = room if self.num_tokens == -1 else self.num_tokens
        if limit > room or limit < 1:
            all_of_them = "-1, or " if self.name == _NAME else ""
            raise ParameterError(
                f"{self.name} must be {all_of_them}from 1 to {room}, {rule}; got {self.num_tokens}.", param=self.name
            )
        return limit

    def apply(self, tokens: list[T], *, room: int, rule: str, added: AddedTokens = AddedTokens()) -> list[T]:
        """The part of a prompt's tokens that is kept, or of a list with something for each of them.

        Args:
            room: and `rule`: as for `limit`.

        Raises:
            ParameterError: as for `limit`.
        """
        limit = self.limit(room=room, rule=rule)
        if len(tokens) <= limit:
            return tokens
        if self.side is not None or sum(added) > limit:
            added = AddedTokens()
        end = len(tokens) - added.behind
        if (self.side or self.text_side) == "right":
            return tokens[: limit - added.behind] + tokens[end:]
        return tokens[: added.before] + tokens[len(tokens) - limit + added.before :]
