"""The most that one operation of a chat template may make or visit."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2
from jinja2.utils import Namespace


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long, or would make too much."""


class Bounds(NamedTuple):
    """The most that one operation may make or visit."""

    num_characters: int  # of a text
    num_items: int = 1 << 20  # of a list, and values within values
    num_bits: int = 1 << 16  # of an integer


class Measures:
    """Measures what an operation makes. Methods raise TemplateLimitError when it would be too much."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def text(self, length: int) -> None:
        """A text of a length."""
        if length > self._bounds.num_characters:
            raise TemplateLimitError(f"it makes a text of more than {self._bounds.num_characters} characters")

    def items(self, count: int) -> None:
        """A list of a length."""
        if count > self._bounds.num_items:
            raise TemplateLimitError(f"it makes a list of more than {self._bounds.num_items} items")

    def bits(self, count: int) -> None:
        """An integer of a length."""
        if count > self._bounds.num_bits:
            raise TemplateLimitError(f"it makes an integer of more than {self._bounds.num_bits} bits")

    def value(self, value: Any) -> int:
        """Every value within a value, as when it becomes a text or is compared; returns about the text's length.

        Values may be shared: a list may hold another twice, and so on, and each visit counts.
        """
        if isinstance(value, str):
            self.text(len(value))
            return len(value)
        length, num_visited, stack = 0, 0, [value]
        while stack:
            each = stack.pop()
            num_visited += 1
            if isinstance(each, str):
                length += len(each) + 2
            elif isinstance(each, Mapping):
                stack += [*each.keys(), *each.values()]
            elif isinstance(each, (list, tuple, set, frozenset)):
                stack += each
            elif isinstance(each, Namespace):
                stack.append(object.__getattribute__(each, "_Namespace__attrs"))
            elif isinstance(each, int):
                length += 1 + each.bit_length() // 3
            else:
                length += 16
            self.items(num_visited + len(stack))
            self.text(length)
        return length
