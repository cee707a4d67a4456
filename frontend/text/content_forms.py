"""Finds the forms of a message's content that a chat template reads: it renders marks, and looks which come out.

The names in a template do not show the form: content may go through macros, variables and filters of any name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Form = Literal["string", "parts", "one_part"]
"""A string; OpenAI's list with a part for each text; or such a list with one part for all texts."""

Message = dict[str, Any]
RenderMessages = Callable[[Sequence[Message]], str]
"""Renders the template with other messages in the place of a conversation's; raises whatever the template does."""

MEDIA_TYPE = "quire.media"
"""The type of a part in whose place an image was. Its `modality` is the kind of item."""

_MARKS = ("quiremarka", "quiremarkb")
_OTHER = ("quireother",)
_STRANGE_KEY = "quirestrangekey"
"""A key that no template reads. It comes out where parts are printed as they are, and not read."""

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


class MediaMark(NamedTuple):
    """The place of an image among the texts of a message."""

    modality: str


Part = str | MediaMark


class Placeholders(NamedTuple):
    """What stands for items in contents that are strings.

    Attributes:
        texts: by kind of item.
        interleaves: items stay where they are among texts; else they stand before all texts.
    """

    texts: Mapping[str, str] = {}
    interleaves: bool = False


def written(
    parts: Sequence[Part], form: Form, placeholders: Placeholders = Placeholders()
) -> str | list[dict[str, Any]]:
    """The content of a message in one of the forms."""
    if form == "string":
        return "\n".join(_as_strings(parts, placeholders))
    if form == "one_part":
        marks, texts = _divided(parts)
        parts = [*marks, *(["\n".join(texts)] if texts else [])]
    return [
        {"type": each.modality} if isinstance(each, MediaMark) else {"type": "text", "text": each} for each in parts
    ]


def _as_strings(parts: Sequence[Part], placeholders: Placeholders) -> list[str]:
    """The parts as strings; a text that has the placeholder of an item keeps it there."""
    marks, texts = _divided(parts)
    if not marks:
        return texts
    if placeholders.interleaves:
        return [placeholders.texts[each.modality] if isinstance(each, MediaMark) else each for each in parts]
    missing = []
    for modality in dict.fromkeys(mark.modality for mark in marks):
        text, count = placeholders.texts[modality], sum(mark.modality == modality for mark in marks)
        missing += [text] * (count - sum(each.count(text) for each in texts))
    return missing + texts


def _divided(parts: Sequence[Part]) -> tuple[list[MediaMark], list[str]]:
    marks = [each for each in parts if isinstance(each, MediaMark)]
    return marks, [each for each in parts if not isinstance(each, MediaMark)]


class ContentForms:
    """The forms that one template reads, by role; each is tried once. All roles of unusual names count as one."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Form], bool] = {}

    def choose(self, messages: Sequence[Message], index: int, texts: Sequence[str], render: RenderMessages) -> Form:
        """The form in which the template reads the `texts` of a message.

        A list of texts stays one if it is read whole. A form that loses none of them is taken otherwise; a string where
        none is found, as for a role that the template leaves out.

        Args:
            messages: the conversation, of which the messages up to this one are rendered with other contents.
        """
        order: tuple[Form, ...] = ("string", "one_part")
        if isinstance(messages[index]["content"], list):
            order = ("parts", "string", "one_part") if len(texts) > 1 else ("parts", "string")
        return next((form for form in order if self.reads(form, messages[: index + 1], render)), "string")

    def reads(self, form: Form, messages: Sequence[Message], render: RenderMessages) -> bool:
        """True if the template reads the content of the last message, or of another with its role, in a form."""
        role = messages[-1]["role"]
        place = role if role in _ROLES else "", form
        if place not in self._known:
            self._known[place] = _comes_out(form, role, messages, render)
        return self._known[place]


def _comes_out(form: Form, role: str, messages: Sequence[Message], render: RenderMessages) -> bool:
    marks, others = _content(_MARKS, form), (_content(_OTHER, "string"), _content(_OTHER, "one_part"))
    for other in others:
        marked = [{**each, "content": marks if each["role"] == role else other} for each in messages]
        try:
            text = render(marked).lower()
        except Exception:  # a template may raise anything where it is given a form that it does not read
            continue
        return all(mark in text for mark in _MARKS) and _STRANGE_KEY not in text
    return False


def _content(texts: Sequence[str], form: Form) -> str | list[dict[str, Any]]:
    content = written(texts, form)
    return content if isinstance(content, str) else [{**part, _STRANGE_KEY: True} for part in content]
