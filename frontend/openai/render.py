"""POST /v1/completions/render and /v1/chat/completions/render: what a request becomes before the model sees it."""

from msgspec import Struct

from quire.core.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.completions import DEFAULT_MAX_TOKENS
from quire.frontend.openai.conversation import Conversations
from quire.frontend.openai.generation import choose_id
from quire.frontend.openai.models import ServedModels
from quire.frontend.openai.schema import ChatRequest, CompletionRequest, StreamOptions


class RenderedRequest(Struct, kw_only=True):
    """Token ids, and how the answer is to be sampled."""

    request_id: str
    token_ids: list[int]
    features: None = None
    sampling_params: SamplingParams
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: None = None


class Rendering:
    """Answers the routes that render."""

    def __init__(self, engine: AsyncLLM, models: ServedModels, conversations: Conversations) -> None:
        self._engine = engine
        self._models = models
        self._conversations = conversations

    async def chat(self, request: ChatRequest) -> RenderedRequest:
        """A conversation. Raises RequestError."""
        request.check()
        self._models.check(request.model)
        prompt = await self._conversations.render(request)
        sampling = self._conversations.sampling(request)
        room = self._engine.max_model_len - len(prompt.token_ids)
        if sampling.max_tokens is None:
            sampling = sampling.replace(max_tokens=max(room, 1))
        return self._rendered("chatcmpl", request, prompt.token_ids, sampling)

    async def completion(self, request: CompletionRequest) -> list[RenderedRequest]:
        """Each of the prompts. Raises RequestError."""
        request.check()
        self._models.check(request.model)
        processor = self._engine.input_processor
        defaults = processor.default_sampling
        limit = request.max_tokens if request.max_tokens is not None else defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
        sampling = request.make_sampling(defaults, max_tokens=limit, logprobs=request.logprobs)
        special = request.add_special_tokens is not False
        prompts = [await processor.read_prompt(each, add_special_tokens=special) for each in request.prompts()]
        return [self._rendered("cmpl", request, prompt.token_ids, sampling) for prompt in prompts]

    def _rendered(
        self, prefix: str, request: ChatRequest | CompletionRequest, token_ids: list[int], sampling: SamplingParams
    ) -> RenderedRequest:
        return RenderedRequest(
            request_id=choose_id(prefix, request, None),
            token_ids=token_ids,
            sampling_params=sampling,
            model=self._models.name,
            stream=bool(request.stream),
            stream_options=request.stream_options,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
        )
