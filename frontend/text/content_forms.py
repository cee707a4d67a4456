"""Finds the forms of a message's content that a chat template reads: it renders marks, and looks which come out.

The names in a template do not show the form: content may go through macros, variables and filters of any name.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

Form = Literal["string", "parts", "one_part"]
"""A string; OpenAI's list with a part for each text; or such a list with one part for all texts."""

Message = dict[str, Any]
RenderMessages = Callable[[Sequence[Message]], str]
"""Renders the template with other messages in the place of a conversation's; raises whatever the template does."""

_MARKS = ("quiremarka", "quiremarkb")
_OTHER = ("quireother",)
_STRANGE_KEY = "quirestrangekey"
"""A key that no template reads. It comes out where parts are printed as they are, and not read."""

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


def written(texts: Sequence[str], form: Form) -> str | list[dict[str, Any]]:
    """The content of a message in one of the forms."""
    if form == "string":
        return "\n".join(texts)
    parts = texts if form == "parts" else ["\n".join(texts)]
    return [{"type": "text", "text": text} for text in parts]


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
