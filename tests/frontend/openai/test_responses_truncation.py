"""The messages that `truncation: "auto"` leaves out of a conversation, and the number of prompts that it renders."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.tool_fields import read_tool_set
from quire.frontend.openai.responses.truncation import NUM_ESTIMATES, fit
from quire.frontend.requests.prompt import Prompt

TEMPLATE_TOKENS = 4
"""Tokens around each message."""


class WordCounter(Conversations):
    """Renders a conversation as its words, a token each, and remembers how many tokens it made each time."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def render(self, request: ChatInput, *, must_fit: bool = True) -> Prompt:  # type: ignore[override]
        text = " ".join(message["content"] for message in request.messages)
        num_tokens = len(text.split()) + TEMPLATE_TOKENS * len(request.messages) + 10 * len(request.tools.functions)
        self.lengths.append(num_tokens)
        return Prompt(text, [0] * num_tokens)


def conversation(turns: list[str], *, tools: int = 0, max_tokens: int | None = None) -> ChatInput:
    messages = [{"role": "system", "content": "Be kind."}]
    for text in turns:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    named = [{"type": "function", "function": {"name": f"tool_{index}"}} for index in range(tools)]
    return ChatInput(names={}, messages=messages, tools=read_tool_set(named or None, None), max_tokens=max_tokens)


def fitted(chat: ChatInput, max_model_len: int, max_text_length: int = 2**30) -> tuple[ChatInput, Prompt, list[int]]:
    counter = WordCounter()
    shorter, prompt = asyncio.run(fit(chat, counter, max_model_len=max_model_len, max_text_length=max_text_length))
    return shorter, prompt, counter.lengths


def least_left_out(chat: ChatInput, room: int) -> int:
    """The fewest turns to leave out, found by trying all numbers."""
    num_turns = len(chat.messages) // 2
    for left_out in range(num_turns):
        kept = chat.messages[:1] + chat.messages[1 + 2 * left_out :]
        tokens = sum(len(message["content"].split()) + TEMPLATE_TOKENS for message in kept)
        if tokens + 10 * len(chat.tools.functions) <= room:
            return left_out
    return num_turns - 1


TEXTS = st.builds(lambda word, times: f"{word} " * times, st.sampled_from(["a", "word", "x" * 60]), st.integers(0, 60))


@settings(max_examples=300, deadline=None)
@given(turns=st.lists(TEXTS, min_size=1, max_size=60), tools=st.integers(0, 5), length=st.integers(1, 2000))
def test_leaves_out_no_more_turns_than_needed(turns: list[str], tools: int, length: int) -> None:
    chat = conversation(turns, tools=tools, max_tokens=16)
    shorter, prompt, lengths = fitted(chat, length)
    left_out = least_left_out(chat, length - 16)
    assert shorter.messages == chat.messages[:1] + chat.messages[1 + 2 * left_out :]
    assert prompt.text == " ".join(message["content"] for message in shorter.messages)
    assert len(lengths) <= NUM_ESTIMATES + len(turns).bit_length() + 1


@pytest.mark.parametrize("num_turns", [100, 1000, 10_000])
def test_few_prompts_are_tried_and_one_of_them_is_long(num_turns: int) -> None:
    draw = random.Random(num_turns)
    chat = conversation(["word " * draw.randint(1, 100) for _ in range(num_turns)], tools=3)
    _, prompt, lengths = fitted(chat, 2000)
    assert 1800 < len(prompt.token_ids) < 2000
    assert len(lengths) <= 5
    assert all(length < 4000 for length in lengths[1:])


def test_a_prompt_that_is_too_long_to_be_tokenized_is_not_tried() -> None:
    chat = conversation(["word " * 20] * 1000)
    whole, prompt, _ = fitted(chat, 2000)
    shorter, same, lengths = fitted(chat, 2000, max_text_length=16 * 2000)
    assert (shorter.messages, same) == (whole.messages, prompt)
    assert max(lengths) < 16 * 2000 / len("word")


def test_what_fits_is_left_alone() -> None:
    chat = conversation(["word " * 20] * 20)
    shorter, _, lengths = fitted(chat, 2000)
    assert shorter is chat
    assert len(lengths) == 1
