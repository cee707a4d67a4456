"""The length of the model's context, and the room that a prompt leaves for its output."""

from quire.core.errors import ParameterError


class ContextLimit:
    """Tokens that prompt and output may have together.

    Args:
        max_model_len: the option's value; an engine that fits it to its memory reports the final number when ready.
        generates: False for a model whose output is vectors: a prompt may fill the context.
    """

    def __init__(self, max_model_len: int, *, generates: bool = True) -> None:
        self.max_model_len = max_model_len
        self._generates = generates

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.max_model_len - 1 if self._generates else self.max_model_len

    def room(self, asked: int | None, num_before: int = 0) -> int:
        """The most tokens of a prompt that leave room for `asked` tokens of output; None: for one, if there is any.

        Args:
            num_before: rows of a soft prompt.

        Raises:
            ParameterError: the output, or the soft prompt, leaves the prompt no room.
        """
        if num_before >= self.longest_prompt:
            raise ParameterError(
                f"The soft prompt has {num_before} rows, but {self.rule}; leave it out, or serve more.", param="model"
            )
        most = self.max_model_len - num_before - 1  # of an output behind a prompt of one token
        if asked and asked > most:
            raise ParameterError(
                f"max_tokens asks for {asked} tokens, but {self.rule}; lower it to at most {most}.",
                param="max_tokens",
            )
        return (self.max_model_len - asked if asked else self.longest_prompt) - num_before

    @property
    def room_rule(self) -> str:
        """What `room` is, for messages."""
        if self._generates:
            return "the most tokens that max_model_len and max_tokens leave for the prompt"
        return "the most tokens that the model reads (max_model_len)"

    def output_tokens(self, num_prompt_tokens: int, asked: int | None, *, fit_context: bool) -> int:
        """The most tokens of an output: the number asked for, or all that there is room for.

        Args:
            fit_context: lower a number that is too large for the context, instead of refusing it.

        Raises:
            ParameterError: the prompt is too long, alone or with the output that is asked for.
        """
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise self.too_long(num_prompt_tokens)
        if asked is None or (asked > room and fit_context):
            return room
        if asked > room:
            raise ParameterError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens asks for {asked} more, which is over the "
                f"limit of {self.max_model_len} (max_model_len); shorten the prompt or lower max_tokens to {room}.",
                param="max_tokens",
            )
        return asked

    @property
    def rule(self) -> str:
        """The limit, for messages on a prompt that is too long."""
        what = "prompt and output together are" if self._generates else "prompts are"
        return f"{what} limited to {self.max_model_len} (max_model_len)"

    def too_long(self, num_prompt_tokens: int, longest: int | None = None) -> ParameterError:
        """The error for a prompt that is too long, or that leaves no room for a single token of output.

        Args:
            longest: the limit, if it is not the context's: that of prompts that are computed in parts.
        """
        rule = self.rule
        if longest is None or longest == self.longest_prompt:
            longest = self.longest_prompt
        else:
            rule = f"prompts are limited to {longest} (max_embed_len)"
        return ParameterError(
            f"The prompt has {num_prompt_tokens} tokens, but {rule}; shorten the prompt to at most {longest} tokens.",
            param="prompt",
        )
