"""Fields that the bodies of several routes share, with vLLM's names and defaults. `null` means unset."""

from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.chat.body_fields import refuse_unsupported
from quire.frontend.pooling.number_formats import EmbedDtype, Endianness
from quire.frontend.pooling.vectors import EncodingFormat
from quire.frontend.requests.request_fields import check_priority, check_salt
from quire.frontend.text.truncation import Side, Truncation

_REMOVED = "normalize is the older name of use_activation; send that."


MAX_INPUTS = 2**14
"""Texts that one request may have."""


class PooledBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of all bodies."""

    model: str | None = None
    user: Any = None  # harmless
    truncate_prompt_tokens: int | None = None  # -1: to the model's length
    truncation_side: Side | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    request_id: str | None = None
    timeout: float | None = None  # seconds; see `requests/deadline.py`
    priority: int | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: Any = None  # of conversations, for servers with --trust-request-mm-kwargs
    normalize: Any = None  # refused: its older name
    use_activation: bool | None = None

    def check(self) -> None:
        """Refuses fields that this server cannot honour.

        Raises:
            ParameterError: the field, by name.
        """
        refuse_unsupported(self)
        if self.normalize is not None:
            raise ParameterError(_REMOVED, param="normalize")
        if self.mm_processor_kwargs and not self.has_conversations:
            raise ParameterError(
                "mm_processor_kwargs goes with conversations, and this request has texts only; leave it out.",
                param="mm_processor_kwargs",
            )
        check_priority(self.priority)
        check_salt(self.cache_salt)

    @property
    def has_conversations(self) -> bool:
        """True if an input may have images, videos or sounds."""
        return False

    @property
    def truncation(self) -> Truncation | None:
        """The cut of a prompt that is too long; None if the request asks for none."""
        return cut_of(self.truncate_prompt_tokens, self.truncation_side)

    @property
    def pads(self) -> bool:
        """True if prompts are made as long as the model's context."""
        return self.padding == "max_length"


def cut_of(num_tokens: int | None, side: Side | None) -> Truncation | None:
    """A cut that, unless `side` says otherwise, keeps a text's first tokens, as the models are trained."""
    return None if num_tokens is None else Truncation(num_tokens, side, text_side="right")


def _is_message(given: Any) -> bool:
    """True for a message, or a list that begins with one."""
    return isinstance(given[0] if isinstance(given, list) else given, dict)


class InputBody(PooledBody, kw_only=True):
    """Fields of bodies with inputs: texts, token ids, or conversations.

    A list of strings or of lists of token ids is several inputs. So is a list of conversations, in `input` as in
    `messages`.
    """

    input: str | list[int | str | list[int | dict[str, Any]] | dict[str, Any]] | None = None
    messages: list[dict[str, Any] | list[dict[str, Any]]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None  # for servers with --trust-request-chat-template
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Any = None  # as mm_processor_kwargs

    @property
    def has_conversations(self) -> bool:
        given = self.input if self.messages is None else self.messages
        return isinstance(given, list) and any(
            isinstance(each, dict | list) and each and _is_message(each) for each in given
        )

    def check(self) -> None:
        """As for all bodies; also checks the fields of conversations."""
        super().check()
        if self.media_io_kwargs and not self.has_conversations:
            raise ParameterError(
                "media_io_kwargs goes with conversations, and this request has texts only; leave it out.",
                param="media_io_kwargs",
            )
        if self.input is None and self.messages is None:
            raise ParameterError("The body must have input or messages.", param="input")
        if self.input is not None and self.messages is not None:
            raise ParameterError("The body must have input or messages, not both.", param="messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ParameterError(
                "continue_final_message and add_generation_prompt contradict each other; leave one out.",
                param="continue_final_message",
            )


class VectorBody(InputBody, kw_only=True):
    """Fields of bodies with inputs that become vectors: the form of the vectors in the answer."""

    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None

    @property
    def format(self) -> EncodingFormat:
        return self.encoding_format or "float"

    @property
    def number_format(self) -> tuple[EmbedDtype, Endianness]:
        """The form of numbers as bytes."""
        return self.embed_dtype or "float32", self.endianness or "native"
