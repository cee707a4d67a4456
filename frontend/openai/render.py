"""POST /v1/completions/render and /v1/chat/completions/render: the prompt and parameters that a request becomes."""

import msgspec

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.generate_bodies import PromptRendering
from quire.frontend.chat.rendered import RenderedRequest
from quire.frontend.openai.completions import DEFAULT_MAX_TOKENS, TextCompletions
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.requests.time_slices import in_time_slices


class Rendering:
    """Answers the routes that render."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations, completions: TextCompletions) -> None:
        self._engine = engine
        self._conversations = conversations
        self._completions = completions
        self._prompts = PromptRendering(engine)

    async def chat(self, request: ChatRequest, headers: ClientHeaders = ClientHeaders()) -> RenderedRequest:
        """Renders a conversation. Raises RequestError."""
        self._check(request)
        chat = request.to_chat_input()
        prompt = await self._conversations.render(chat, must_fit=chat.truncation is None)
        return await self._conversations.rendered(
            chat,
            prompt,
            f"chatcmpl-{headers.choose_id(request.request_id)}",
            stream_options=request.stream_options,
            return_token_ids=request.return_token_ids,
            wants_offsets=bool(request.return_token_offsets),
        )

    async def completion(
        self, request: CompletionRequest, headers: ClientHeaders = ClientHeaders()
    ) -> list[RenderedRequest]:
        """Renders each of the prompts. Raises RequestError."""
        self._check(request)
        if request.prompt_embeds:
            raise ParameterError("prompt_embeds are not rendered: they have no token ids.", param="prompt_embeds")
        if request.use_beam_search:
            raise ParameterError("A beam search cannot be rendered; leave it out.", param="use_beam_search")
        fields = self._completions.sampling_fields(request)
        if request.max_tokens is None:
            sampling_input = self._engine.sampling_input
            default = sampling_input.defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
            fields["max_tokens"] = sampling_input.limit_output(default)
        sampling = SamplingParams(**fields)
        special, prompts = request.add_special_tokens is not False, request.prompts()
        base_id = f"cmpl-{headers.choose_id(request.request_id)}"
        rendered = []
        async for index, each in in_time_slices(enumerate(prompts)):
            must_fit = request.truncation is None
            prompt = await self._engine.prompts.read(each, add_special_tokens=special, must_fit=must_fit)
            one = await self._prompts.of_prompt(
                prompt,
                sampling,
                base_id if len(prompts) == 1 else f"{base_id}-{index}",
                has_special_tokens=special,
                truncation=request.truncation,
                wants_offsets=bool(request.return_token_offsets),
            )
            one.stream, one.stream_options = bool(request.stream), request.stream_options
            one.return_token_ids = request.return_token_ids
            one.cache_salt, one.priority = request.cache_salt, request.priority or 0
            rendered.append(one)
        return rendered

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        """Checks the request as for an answer, but allows return_token_offsets."""
        msgspec.structs.replace(request, return_token_offsets=None).check()
        self._engine.model.choose(request.model)
