"""Asks a model questions, and reads the probability of each label as the first token of its reply."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.openai.decisions.questions import LabelRead, Question, among
from quire.frontend.openai.first_tokens import FirstTokens, logprobs_of
from quire.frontend.text.tokenizer import Tokenizer, needed

_LOGPROBS = ("raw_logprobs", "processed_logprobs")


class LabelReads:
    """Reads labels with any model that has a chat template, and a token for each label after its prompts."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations) -> None:
        self._engine = engine
        self._conversations = conversations
        self._first_tokens = FirstTokens(engine)
        self._label_ids = functools.lru_cache(maxsize=64)(self._find_label_ids)

    async def read(
        self,
        questions: Sequence[Question],
        state: str,
        reply_id: str,
        headers: ClientHeaders,
        *,
        instructions: str | None = None,
        template_variables: dict[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[LabelRead]:
        """A read for each question. The prompts share the state, which is computed once if prefixes are cached.

        Args:
            instructions: a system message before the state.

        Raises:
            ParameterError: this server or its model cannot return the labels' probabilities.
            EngineError: the engine failed.
        """
        tokenizer = needed(self._engine.tokenizer)
        mode = self._engine.config.logprobs_mode
        if mode not in _LOGPROBS:
            raise ParameterError(
                f"Decisions are made of log-probabilities, and this server tells {mode}; its --logprobs-mode must be "
                f"{' or '.join(_LOGPROBS)}."
            )
        variables = {"enable_thinking": False, **(template_variables or {})}
        if variables["enable_thinking"]:
            raise ParameterError(
                "A decision is the first token of the reply, so there is no room to think; leave enable_thinking out.",
                param="chat_template_kwargs",
            )
        system = [{"role": "system", "content": instructions}] if instructions else []
        prompts = []
        for question in questions:
            messages = [*system, {"role": "user", "content": question.prompt(state)}]
            chat = ChatInput(names={}, messages=messages, template_variables=variables)
            ids = (await self._conversations.render(chat)).token_ids
            prompts.append((ids, self._label_ids(_tail(tokenizer, ids), question.labels)))
        outputs = await self._first_tokens.read(
            prompts,
            reply_id,
            temperature=0,
            priority=priority,
            cache_salt=cache_salt,
            data_parallel_rank=headers.data_parallel_rank,
        )
        reads = []
        for output, (ids, labels) in zip(outputs, prompts, strict=True):
            logprobs, [completion] = logprobs_of(output, labels), output.outputs
            read = LabelRead(
                probabilities=among(logprobs),
                label_mass=sum(map(math.exp, logprobs)),
                argmax_is_label=completion.token_ids[0] in labels,
                input_tokens=len(ids),
                output_tokens=len(completion.token_ids),
                cached_tokens=output.num_cached_tokens or 0,
            )
            reads.append(read)
        return reads

    def _find_label_ids(self, tail: tuple[int, ...], labels: tuple[str, ...]) -> list[int]:
        """The token of each label after a prompt with this end."""
        tokenizer = needed(self._engine.tokenizer)
        text = tokenizer.decode(list(tail), skip_special_tokens=False)
        found: list[int] = []
        for label in labels:
            *before, last = tokenizer.encode(text + label, add_special_tokens=False)
            if tuple(before) != tail or last in found:
                raise ParameterError(
                    f"The model cannot be asked this: its tokenizer has no token for the label {label!r} alone behind "
                    "its prompts. A question with other labels may do: choices have letters, scores digits.",
                    param="questions",
                )
            found.append(last)
        return found


def _tail(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[int, ...]:
    """The end of a prompt after its last added token, such as a mark of a turn."""
    start = next((i + 1 for i in reversed(range(len(token_ids))) if token_ids[i] in tokenizer.added_token_ids), 0)
    return tuple(token_ids[start:])
