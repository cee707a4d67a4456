"""POST /tokenize and /detokenize: the model's tokenizer and chat template by themselves."""

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.answers import DetokenizeResponse, TokenizeResponse
from quire.frontend.openai.models import ServedModels
from quire.frontend.openai.schema import DetokenizeRequest, TokenizeRequest
from quire.frontend.server_config import ServerConfig


class Tokenization:
    """Answers tokenization requests."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig, models: ServedModels) -> None:
        self._engine = engine
        self._server = server
        self._models = models
        self._template = server.read_chat_template()

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text or of a rendered conversation. Raises RequestError."""
        request.check()
        self._models.check(request.model)
        processor = self._engine.input_processor
        text, add_special_tokens = request.prompt, request.add_special_tokens is not False
        if text is None:
            text, add_special_tokens = self._render(request), bool(request.add_special_tokens)
        ids = await processor.tokenize(text, add_special_tokens=add_special_tokens)
        strings = [processor.tokenizer.token(i) or "" for i in ids] if request.return_token_strs else None
        return TokenizeResponse(len(ids), self._engine.max_model_len, ids, strings)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids, special tokens included. Raises RequestError."""
        self._models.check(request.model)
        tokenizer = self._engine.input_processor.tokenizer
        for token_id in request.tokens:
            if tokenizer.token(token_id) is None:
                raise ParameterError(f"tokens holds {token_id}, which the tokenizer does not know.", param="tokens")
        return DetokenizeResponse(tokenizer.decode(request.tokens, skip_special_tokens=False))

    def _render(self, request: TokenizeRequest) -> str:
        assert request.messages is not None
        return self._engine.input_processor.render_chat(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            chat_template=self._template,
            content_format=self._server.chat_template_content_format,
            chat_template_kwargs={
                **(self._server.default_chat_template_kwargs or {}),
                **(request.chat_template_kwargs or {}),
            },
        )
