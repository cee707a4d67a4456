"""Makes a conversation fit the model's context by leaving out its oldest turns, for `truncation: "auto"`."""

import bisect
import itertools
import operator

import msgspec

from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.conversation import Conversations
from quire.frontend.requests.prompt import Prompt

NUM_ESTIMATES = 6
"""Attempts that estimate from the sizes of turns; after these, the search halves its range."""


async def fit(
    chat: ChatInput, conversations: Conversations, *, max_model_len: int, max_text_length: int
) -> tuple[ChatInput, Prompt]:
    """The request with the most of its newest turns that leave room for an answer, and its prompt.

    A turn begins with a user's message. System messages before the first turn stay. The last turn stays too: if it is
    too long by itself, the request is refused later as any other.

    Every attempt tokenizes a whole prompt, which takes time. So the next attempt is estimated from one prompt's length
    in tokens and the sizes of the turns in bytes.

    Args:
        max_model_len: prompt and output together, in tokens.
        max_text_length: characters of the longest prompt that is tokenized; longer prompts are not tried.

    Raises:
        ParameterError: the conversation cannot be rendered.
    """
    room = max_model_len - max(chat.max_tokens or 1, 1)
    starts = [index for index, message in enumerate(chat.messages) if message.get("role") == "user"]
    if len(starts) < 2:
        return chat, await conversations.render(chat, must_fit=False)
    sizes = _sizes(chat, starts)
    left_out = min(bisect.bisect_left(sizes, -max_text_length, key=operator.neg), len(starts) - 1)
    too_few, enough = left_out - 1, len(starts)  # turns; all numbers tried lie outside of these two
    for attempt in itertools.count(1):
        shorter = _without(chat, starts, left_out)
        prompt = await conversations.render(shorter, must_fit=False)
        num_tokens = len(prompt.token_ids)
        if num_tokens <= room or left_out == len(starts) - 1:
            enough, fitting = left_out, (shorter, prompt)
        else:
            too_few = left_out
        if enough - too_few == 1:
            break
        if attempt <= NUM_ESTIMATES:
            size_wanted = sizes[left_out] * room / max(num_tokens, 1)
            left_out = bisect.bisect_left(sizes, -size_wanted, lo=too_few + 1, hi=enough - 1, key=operator.neg)
        else:
            left_out = (too_few + enough) // 2
    return fitting


def _sizes(chat: ChatInput, starts: list[int]) -> list[int]:
    """Bytes that remain when 0, 1, 2 ... turns are left out, tools and system messages included."""
    sizes = [len(msgspec.json.encode(message)) for message in chat.messages]
    stays = len(msgspec.json.encode(chat.tools.described)) + sum(sizes[: starts[0]])
    onwards = list(itertools.accumulate(reversed(sizes)))[::-1]  # of each message and all after it
    return [stays + onwards[start] for start in starts]


def _without(chat: ChatInput, starts: list[int], num_turns: int) -> ChatInput:
    if num_turns == 0:
        return chat
    return msgspec.structs.replace(chat, messages=[*chat.messages[: starts[0]], *chat.messages[starts[num_turns] :]])
