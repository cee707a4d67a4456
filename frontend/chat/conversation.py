"""Opens the model's answer to a conversation, as events that each protocol writes in its own form."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from quire.core.errors import ParameterError
from quire.core.wire.request_ids import engine_id
from quire.core.wire.sampling_params import SamplingParams, ThinkingMarks
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.answer_events import Choice, Turn
from quire.frontend.chat.answer_reader import AnswerReader
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.client_headers import RANK_HEADER, ClientHeaders
from quire.frontend.chat.config import ChatConfig
from quire.frontend.chat.generate_bodies import PromptRendering
from quire.frontend.chat.predicted_output import PredictedOutput
from quire.frontend.chat.renaming import renamed
from quire.frontend.chat.rendered import ParseContext, ReasoningParserKwargs, RenderedRequest, StreamOptions
from quire.frontend.chat.renderer import Renderer
from quire.frontend.checkpoint.serving_defaults import read_serving_defaults
from quire.frontend.metrics.tool_calls import ToolCallSearches
from quire.frontend.outputs import RequestOutput
from quire.frontend.parsing.formats.checkpoint_marks import read_marks
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.merging import OutputStream
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.submission import Submission


class _Given:
    """The stream of an output that is there already."""

    def __init__(self, output: RequestOutput) -> None:
        self._output = output

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        yield self._output

    def close(self) -> None:
        """Nothing runs."""


class Conversations:
    """Renders conversations and opens their answers.

    Args:
        announces: log what is served, such as the form of calls that the checkpoint shows.

    Attributes:
        searches: a metric, of a server that was given a parser of calls.
    """

    def __init__(self, engine: AsyncLLM, config: ChatConfig, *, announces: bool = True) -> None:
        self._engine = engine
        checkpoint, reasoning = read_serving_defaults(Path(engine.model.folder)), engine.model.reasoning
        template = config.read_chat_template() or engine.chat_templates.for_tools
        parsers = config.with_defaults(checkpoint, template, announces=announces).make_output_parsers(
            checkpoint.complete(reasoning), read_marks(engine.tokenizer)
        )
        counts = parsers.reads_calls and engine.metrics is not None
        self.searches = ToolCallSearches(engine.model.name) if counts else None
        self._renderer = Renderer(engine.chat_templates, engine.async_tokenizer, parsers, config, engine.media)
        self._prompts = PromptRendering(engine)
        self._template_variables = config.template_variables
        self._reader = AnswerReader(
            parsers,
            engine.tokenizer,
            may_think=reasoning.parser_name is not None,
            thinks_freely=not engine.model.structured_outputs.enable_in_reasoning,
            template_variables=config.template_variables,
            searches=self.searches,
        )

    def check_generates(self) -> None:
        """Raises ParameterError if the model makes vectors, classes or scores instead of answers."""
        self._engine.check_generates()

    async def render(self, chat: ChatInput, *, must_fit: bool = True) -> Prompt:
        """The prompt.

        Args:
            must_fit: before tokenizing, refuse a text that exceeds the context whatever its tokens are. False for a
                prompt that will be cut.

        Raises:
            ParameterError: the conversation cannot be rendered, by the client's name of the field.
        """
        with renamed(**chat.names), renamed(prompt="messages"):
            return await self._renderer.render(chat, must_fit=must_fit)

    async def rendered(
        self,
        chat: ChatInput,
        prompt: Prompt,
        request_id: str,
        *,
        stream_options: StreamOptions | None = None,
        return_token_ids: bool | None = None,
        wants_offsets: bool = False,
        param: str = "messages",
    ) -> RenderedRequest:
        """The conversation as a request that another server may generate an answer to.

        Args:
            prompt: the rendered conversation.
            wants_offsets: return which characters of the prompt each token is.
            param: the client's name of the conversation.

        Raises:
            ParameterError: the conversation cannot be served as asked, by the client's name of the field.
        """
        if chat.beams is not None:
            raise ParameterError("A beam search cannot be rendered; leave it out.", param="use_beam_search")
        text, variables = prompt.text or "", self._template_variables(chat)
        with renamed(**chat.names):
            sampling = SamplingParams(**{**self._asked(chat), **self._reader.rendered_fields(chat, text)})
        rendered = await self._prompts.of_prompt(
            prompt,
            sampling,
            request_id,
            has_special_tokens=chat.add_special_tokens,
            truncation=chat.truncation,
            lowers_max_tokens=chat.lowers_max_tokens,
            wants_offsets=wants_offsets,
            param=param,
        )
        rendered.reasoning_ended = self._reader.reasoning_ended(chat, text)
        if self._reader.reads_reasoning:
            rendered.reasoning_parser_kwargs = ReasoningParserKwargs(chat_template_kwargs=variables)
        rendered.parse_context = ParseContext.of(chat, variables)
        rendered.stream, rendered.stream_options = chat.streams, stream_options
        rendered.return_token_ids = return_token_ids
        rendered.cache_salt, rendered.priority = chat.cache_salt, chat.priority
        return rendered

    @property
    def parses(self) -> bool:
        """True if answers are searched for reasoning or calls."""
        return self._reader.parses

    def shows_tokens(self, chat: ChatInput) -> bool:
        """True if the client sees token ids and log-probabilities of the answer."""
        return self._reader.shows_tokens(chat)

    def text_sampling(self, chat: ChatInput) -> SamplingParams:
        """Those sampling parameters that decide what the text of an answer's tokens is. Raises ParameterError."""
        with renamed(**chat.names):
            shown = self._reader.shown_special_ids(chat)
            unread = {"structured_outputs": None, "shown_special_token_ids": shown or None}
            return SamplingParams(**{**self._asked(chat), **unread})

    def reread(self, chat: ChatInput, output: RequestOutput, choices: list[Choice] | None) -> Turn:
        """An answer that another server has generated.

        Args:
            output: the whole of it.
            choices: its readers.
        """
        return Turn(
            _Given(output),
            output.num_prompt_tokens,
            choices,
            self._engine.async_tokenizer.tokenizer,
            reads_reasoning=self._reader.reads_reasoning,
            shows_tokens=self._reader.shows_tokens(chat),
        )

    def shown_special_ids(self, chat: ChatInput) -> list[int]:
        """The special tokens that a text must show, so that it can be read."""
        return self._reader.shown_special_ids(chat)

    async def choices(self, chat: ChatInput, prompt_token_ids: list[int]) -> list[Choice] | None:
        """Readers of an answer that came from elsewhere, one for each sequence; None where each text is the answer."""
        return await self._reader.choices(chat, self._text_of(prompt_token_ids))

    def after_reasoning(
        self,
        asked: StructuredOutputsParams,
        prompt_token_ids: list[int],
        *,
        template_variables: dict[str, Any] | None = None,
    ) -> StructuredOutputsParams:
        """Applies a constraint from the end of the reasoning on, as `AnswerReader.after_reasoning`."""
        return self._reader.after_reasoning(
            asked, self._text_of(prompt_token_ids), template_variables=template_variables
        )

    def _text_of(self, token_ids: list[int]) -> str:
        if self._engine.tokenizer is None:
            return ""
        return self._engine.tokenizer.decode(token_ids, skip_special_tokens=False)

    def thinking_marks(self, prompt_text: str) -> ThinkingMarks | None:
        """The marks around reasoning, for a request with a thinking budget and a prompt of any kind."""
        return self._reader.thinking_marks(prompt_text)

    async def open(
        self, chat: ChatInput, reply_id: str, headers: ClientHeaders, *, prompt: Prompt | None = None
    ) -> Turn:
        """Hands the conversation to the engine.

        Args:
            prompt: the rendered conversation; None renders it.

        Raises:
            ParameterError: the request cannot be served as asked, by the client's name of the field.
            EngineError: the engine cannot take requests.
        """
        self.check_generates()
        prompt = prompt or await self.render(chat, must_fit=chat.truncation is None)
        if chat.tools.choice.mode == "auto" and not self._reader.finds_calls:
            raise ParameterError(
                "This server cannot find calls in the model's text: start it with --enable-auto-tool-choice and "
                "--tool-call-parser, or set tool_choice to none.",
                param="tool_choice",
            )
        request_id = engine_id(reply_id)
        text = prompt.text or ""
        with renamed(**chat.names), renamed(prompt="messages", data_parallel_rank=RANK_HEADER):
            choices = await self._reader.choices(chat, text)
            prediction = await self._prediction(chat)
            stream = await self._open_stream(chat, prompt, request_id, headers.data_parallel_rank, prediction)
        # Beams are read after they have ended.
        if chat.tools.bounds_calls and choices is not None and isinstance(stream, RequestStream):
            for index, choice in enumerate(choices):
                stream.watch(index, choice.take)
        return Turn(
            stream,
            len(prompt.token_ids),
            choices,
            self._engine.async_tokenizer.tokenizer,
            reads_reasoning=self._reader.reads_reasoning,
            shows_tokens=self._reader.shows_tokens(chat),
            predicted=PredictedOutput(prediction, chat.num_choices) if chat.prediction else None,
        )

    def _asked(self, chat: ChatInput) -> dict[str, Any]:
        """The client's sampling parameters over the checkpoint's defaults, within the server's limits."""
        sampling_input = self._engine.sampling_input
        defaults = sampling_input.defaults
        asked = chat.max_tokens if chat.max_tokens is not None else defaults.get("max_tokens")
        return {**defaults, **chat.sampling, "max_tokens": sampling_input.limit_output(asked)}

    async def _prediction(self, chat: ChatInput) -> list[int]:
        """The tokens of the predicted answer, as many as may come. It ends before one that the model does not have."""
        if not chat.prediction:
            return []
        tokenize = self._engine.async_tokenizer.tokenize
        token_ids = await tokenize(chat.prediction, add_special_tokens=False, must_fit=False)
        token_ids, known = token_ids[: self._engine.max_model_len], self._engine.config.spec.vocab_size
        return token_ids[: next((place for place, each in enumerate(token_ids) if each >= known), len(token_ids))]

    async def _open_stream(
        self, chat: ChatInput, prompt: Prompt, request_id: str, data_parallel_rank: int | None, prediction: list[int]
    ) -> OutputStream:
        fields = {**self._asked(chat), **self._reader.sampling_fields(chat, prompt.text or "")}
        sampling = SamplingParams(**fields)
        if chat.beams is not None:
            return await self._open_beams(chat, chat.beams, prompt, sampling, request_id, data_parallel_rank)
        return await self._engine.open_stream(
            Submission(
                prompt,
                sampling,
                request_id,
                priority=chat.priority,
                cache_salt=chat.cache_salt,
                add_special_tokens=chat.add_special_tokens,
                truncation=chat.truncation,
                fit_context=chat.max_tokens is None or chat.lowers_max_tokens,
                grammar_is_whole=True,
                data_parallel_rank=data_parallel_rank,
                prediction=prediction,
            ),
        )

    async def _open_beams(
        self,
        chat: ChatInput,
        beams: dict[str, Any],
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: str,
        data_parallel_rank: int | None,
    ) -> OutputStream:
        if sampling.structured_outputs is not None:
            raise ParameterError(
                "Calls that are asked for and strict functions are held to a grammar, which does not go with "
                "use_beam_search; leave one out.",
                param="tools",
            )
        limit = sampling.max_tokens or self._engine.max_model_len - len(prompt.token_ids)
        params = BeamSearchParams(
            **beams, max_tokens=limit, shown_special_token_ids=sampling.shown_special_token_ids or []
        )
        return await self._engine.open_beams(
            Submission(
                prompt,
                params,
                request_id,
                priority=chat.priority,
                cache_salt=chat.cache_salt,
                data_parallel_rank=data_parallel_rank,
            ),
            returns_logprobs=sampling.logprobs is not None,
        )
