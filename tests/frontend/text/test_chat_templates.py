"""The choice of a conversation's template."""

from pathlib import Path

import pytest

from quire.core.errors import ParameterError
from quire.frontend.text.chat_templates import ChatTemplates
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo

OWN = {"default": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": "T"}
MESSAGES = [{"role": "user", "content": "hi"}]


def make(templates: dict[str, str] = OWN) -> ChatTemplates:
    special = {"bos_token": "<s>"}
    backend = tokenizers_zoo.byte_level()
    return ChatTemplates(
        Tokenizer(FastBackend(backend), special_tokens=special, chat_templates=templates, folder=Path("nowhere")),
        "tiny",
    )


def test_the_checkpoints_template_or_the_callers() -> None:
    assert make().render(MESSAGES) == "<s>hi"
    assert make().render(MESSAGES, tools=[{"type": "function"}]) == "T"
    assert make().render(MESSAGES, chat_template="tool_use") == "T"
    assert make().render(MESSAGES, chat_template="{{ messages | length }}") == "1"
    assert make().render(MESSAGES, chat_template="{{ x }}", chat_template_kwargs={"x": 3}) == "3"


def test_no_template() -> None:
    with pytest.raises(ParameterError, match=r"'tiny' has no chat template.*--chat-template"):
        make({}).render(MESSAGES)


def test_no_messages() -> None:
    with pytest.raises(ParameterError, match="must not be empty"):
        make().render([])


def test_no_tokenizer() -> None:
    with pytest.raises(ParameterError, match="--skip-tokenizer-init"):
        ChatTemplates(None, "tiny").render(MESSAGES)
