"""Arguments that are one thing or a list of them, as lists."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from quire.core.errors import ParameterError
from quire.core.wire.field_types import plain_numbers
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.requests.prompt import PromptLike
from quire.frontend.text.chat_template import Message

T = TypeVar("T")

LoRAs = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapters of a call: one for all prompts, or one each; None: none."""


def prompts_of(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """The prompts as a list. A list of integers is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ParameterError(f"prompts must be one prompt or a list, not {type(prompts).__name__}.", param="prompts")
    many: list[Any] = list(plain_numbers(prompts))
    return [many] if many and all(isinstance(each, int) for each in many) else many


def with_kwargs(prompts: list[PromptLike], kwargs: Mapping[str, Any]) -> list[PromptLike]:
    """The prompts with keywords of the processor for their items; a prompt's own go first."""
    if not kwargs:
        return prompts
    given: list[Any] = prompts
    return [_with_kwargs(each, kwargs) for each in given]


def _with_kwargs(prompt: Any, kwargs: Mapping[str, Any]) -> Any:
    own: Any = prompt.get("mm_processor_kwargs") if isinstance(prompt, dict) else 0
    if not isinstance(own, dict | None):
        return prompt  # what reads it tells what is wrong
    return {**prompt, "mm_processor_kwargs": {**kwargs, **(own or {})}}


def conversations_of(messages: Message | Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """The conversations as lists of messages."""
    if isinstance(messages, dict):  # one message
        return [[messages]]
    several: Any = [messages] if messages and isinstance(messages[0], dict) else messages
    return [list(conversation) for conversation in several]


def one_each(name: str, given: T | Sequence[T | None] | None, kind: type[T], count: int, default: T) -> list[T]:
    """An entry for each of `count` prompts.

    Args:
        name: the argument's.
        given: one for all, or a list.
        default: in the place of None.

    Raises:
        ParameterError: an entry is of another type, or there are more or fewer than prompts.
    """
    if given is None or isinstance(given, kind):
        return [default if given is None else given] * count
    if not isinstance(given, (list, tuple)) or not all(each is None or isinstance(each, kind) for each in given):
        raise ParameterError(f"{name} must be {kind.__name__}, or a list of them.", param=name)
    if len(given) != count:
        raise ParameterError(f"{name} has {len(given)} entries for {count} prompts; give one, or one each.", param=name)
    return [default if each is None else each for each in given]


def adapters_of(given: LoRAs, count: int) -> list[LoRARequest | None]:
    """The adapter of each of `count` prompts. Raises ParameterError, as `one_each`."""
    if given is None:
        return [None] * count
    many = one_each("lora_request", given, LoRARequest, count, _NO_ADAPTER)
    return [None if each is _NO_ADAPTER else each for each in many]


_NO_ADAPTER = LoRARequest("none", 1, "none")
