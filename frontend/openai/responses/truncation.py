"""Makes a conversation fit the model's context by leaving out its oldest turns, for `truncation: "auto"`."""

import msgspec

from quire.frontend.openai.conversation import Conversations
from quire.frontend.openai.schema import ChatRequest
from quire.frontend.openai.turn import Rendered


async def fit(chat: ChatRequest, conversations: Conversations, max_model_len: int) -> tuple[ChatRequest, Rendered]:
    """The request with as many of its newest turns as leave room for an answer, and its prompt.

    A turn begins with a user's message. System messages before the first one stay, and so does the last turn: if that
    alone is too long, the request is refused later as any other.

    Raises:
        ParameterError: the conversation cannot be rendered.
    """
    needed = max(chat.token_limit[1] or 1, 1)
    prompt = await conversations.render(chat)
    starts = [index for index, message in enumerate(chat.messages) if message.get("role") == "user"]
    if len(prompt.token_ids) + needed <= max_model_len or len(starts) < 2:
        return chat, prompt
    system = chat.messages[: starts[0]]
    low, high = 1, len(starts) - 1  # the least number of turns to leave out, by halving
    while low < high:
        middle = (low + high) // 2
        shorter = await conversations.render(_without(chat, system, starts[middle]))
        if len(shorter.token_ids) + needed <= max_model_len:
            high = middle
        else:
            low = middle + 1
    chat = _without(chat, system, starts[low])
    return chat, await conversations.render(chat)


def _without(chat: ChatRequest, system: list, start: int) -> ChatRequest:
    return msgspec.structs.replace(chat, messages=[*system, *chat.messages[start:]])
