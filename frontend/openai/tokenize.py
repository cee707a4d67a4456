"""POST /tokenize and /detokenize: the model's tokenizer and chat template without a generation."""

import functools
from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.body_fields import read_overrides
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.tool_fields import read_tool_set
from quire.frontend.openai.answers import DetokenizeResponse, TokenizeResponse
from quire.frontend.requests.time_slices import in_thread_if_long
from quire.frontend.text.tokenizer import Tokenizer

INLINE_TOKENS = 4096
"""More token ids than this are detokenized in a thread."""


_OF_MESSAGES = (
    *("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs", "media_io_kwargs"),
    "mm_processor_kwargs",
)
"""Fields that a prompt does not have."""


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: either `prompt`, or `messages` with the other fields of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # for servers with --trust-request-chat-template
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        """Refuses both or neither of prompt and messages, and fields of messages beside a prompt."""
        if (self.prompt is None) == (self.messages is None):
            raise ParameterError("Give either prompt or messages.", param="prompt")
        if self.prompt is not None:
            for name in _OF_MESSAGES:
                if getattr(self, name) not in (None, {}):
                    raise ParameterError(f"{name} goes with messages, not with prompt.", param=name)

    def to_chat_input(self) -> ChatInput:
        """The conversation, for its prompt alone.

        Raises:
            ParameterError: a tool that is malformed.
        """
        return ChatInput(
            names={},
            messages=self.messages or [],
            tools=read_tool_set(self.tools, None),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            chat_template=self.chat_template,
            template_variables=self.chat_template_kwargs or {},
            media=read_overrides(self),
        )


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Tokenization:
    """Answers tokenization requests."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations) -> None:
        self._engine = engine
        self._tokenizer = engine.async_tokenizer
        self._conversations = conversations

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text or of a rendered conversation. Raises RequestError."""
        request.check()
        self._engine.model.choose(request.model)
        if request.prompt is None:
            ids = (await self._conversations.render(request.to_chat_input())).token_ids
        else:
            special = request.add_special_tokens is not False
            ids = await self._tokenizer.tokenize(request.prompt, add_special_tokens=special)
        strings = None
        if request.return_token_strs:
            tokenizer = self._tokenizer.tokenizer
            strings = await in_thread_if_long(
                lambda: [tokenizer.token(i) or "" for i in ids], is_long=len(ids) > INLINE_TOKENS
            )
        return TokenizeResponse(len(ids), self._engine.max_model_len, ids, strings)

    def info(self, chat_template: str | None) -> dict[str, Any]:
        """The tokenizer's configuration, with the server's own chat template if it has one."""
        tokenizer = self._tokenizer.tokenizer
        config = tokenizer.read_config()
        own = chat_template or tokenizer.chat_templates.get("default")
        told = {name: value for name, value in config.items() if name not in ("vocab_file", "merges_file")}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **told, **({"chat_template": own} if own else {})}

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids, special tokens included. Raises RequestError."""
        self._engine.model.choose(request.model)
        longest = self._tokenizer.max_text_length
        if len(request.tokens) > longest:
            raise ParameterError(
                f"tokens holds {len(request.tokens)} ids; at most {longest} are made text of at once "
                f"where max_model_len is {self._engine.max_model_len}; send them in pieces.",
                param="tokens",
            )
        tokenizer = self._tokenizer.tokenizer
        decode = functools.partial(_decode, tokenizer, request.tokens)
        return DetokenizeResponse(await in_thread_if_long(decode, is_long=len(request.tokens) > INLINE_TOKENS))


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    for token_id in token_ids:
        if tokenizer.token(token_id) is None:
            raise ParameterError(f"tokens holds {token_id}, which the tokenizer does not know.", param="tokens")
    return tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]
