"""POST /v1/completions/render and /v1/chat/completions/render: the prompt and parameters that a request becomes."""

import functools

import msgspec
from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.openai.completions import DEFAULT_MAX_TOKENS, TextCompletions
from quire.frontend.openai.generate import GenerateSampling
from quire.frontend.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from quire.frontend.requests.async_tokenizer import INLINE_CHARACTERS
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.turns import apart, in_turns


class RenderedRequest(Struct, kw_only=True):
    """Token ids, and how the answer is to be sampled."""

    request_id: str
    token_ids: list[int]
    prompt_text: str | None = None  # None for a prompt of token ids
    token_offsets: list[tuple[int, int]] | None = None  # characters of the text, with return_token_offsets
    features: None = None
    sampling_params: GenerateSampling
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: None = None


class Rendering:
    """Answers the routes that render."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations, completions: TextCompletions) -> None:
        self._engine = engine
        self._conversations = conversations
        self._completions = completions

    async def chat(self, request: ChatRequest) -> RenderedRequest:
        """Renders a conversation. Raises RequestError."""
        self._check(request)
        chat = request.to_chat_input()
        prompt = await self._conversations.render(chat, must_fit=chat.truncation is None)
        sampling = self._conversations.sampling(chat)
        return await self._rendered("chatcmpl", request, prompt, sampling, special=bool(request.add_special_tokens))

    async def completion(self, request: CompletionRequest) -> list[RenderedRequest]:
        """Renders each of the prompts. Raises RequestError."""
        self._check(request)
        if request.prompt_embeds:
            raise ParameterError("prompt_embeds are not rendered: they have no token ids.", param="prompt_embeds")
        fields = self._completions.sampling_fields(request)
        if request.max_tokens is None:
            sampling_input = self._engine.sampling_input
            default = sampling_input.defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
            fields["max_tokens"] = sampling_input.limit_output(default)
        sampling = SamplingParams(**fields)
        special = request.add_special_tokens is not False
        rendered = []
        async for each in in_turns(request.prompts()):
            must_fit = request.truncation is None
            prompt = await self._engine.prompts.read(each, add_special_tokens=special, must_fit=must_fit)
            rendered.append(await self._rendered("cmpl", request, prompt, sampling, special=special))
        return rendered

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        """Checks the request as for an answer, but allows return_token_offsets."""
        msgspec.structs.replace(request, return_token_offsets=None).check()
        self._engine.model.check_name(request.model)

    async def _rendered(
        self,
        prefix: str,
        request: ChatRequest | CompletionRequest,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        special: bool,
    ) -> RenderedRequest:
        text, token_ids = prompt.text, prompt.token_ids
        offsets = None
        if text is not None and request.return_token_offsets:
            tokenizer = self._engine.async_tokenizer.tokenizer
            find = functools.partial(tokenizer.offsets, text, add_special_tokens=special)
            offsets = await apart(find, is_long=len(text) > INLINE_CHARACTERS)
        if (truncation := request.truncation) is not None:
            cut = functools.partial(
                self._engine.prompts.part,
                prompt=prompt,
                truncation=truncation,
                max_tokens=sampling.max_tokens,
                has_special_tokens=special,
            )
            token_ids, offsets = cut(token_ids), None if offsets is None else cut(offsets)
        if len(token_ids) >= self._engine.max_model_len:
            raise ParameterError(
                f"The prompt has {len(token_ids)} tokens, but prompt and output together are limited to "
                f"{self._engine.max_model_len} (max_model_len); shorten it.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
        if sampling.max_tokens is None:
            sampling = sampling.replace(max_tokens=self._engine.max_model_len - len(token_ids))
        return RenderedRequest(
            request_id=f"{prefix}-{ClientHeaders().choose_id(request.request_id)}",
            token_ids=token_ids,
            prompt_text=text,
            token_offsets=offsets,
            sampling_params=GenerateSampling.of(sampling),
            model=self._engine.model.name,
            stream=bool(request.stream),
            stream_options=request.stream_options,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
        )
