"""The model's answer to a conversation, as events that every protocol renders in its own words.

A chat request is the one form of a conversation inside the server: the other protocols translate theirs into it.
"""

import asyncio
import functools
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ParameterError
from quire.core.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from quire.frontend.input_processor import PromptLike
from quire.frontend.openai import constraints
from quire.frontend.openai.beams import open_beams
from quire.frontend.openai.generation import OutputStream, engine_id, log_prompt
from quire.frontend.openai.schema import ChatRequest, TokenizeRequest
from quire.frontend.openai.tool_fields import read_tool_choice, read_tools
from quire.frontend.outputs import CompletionOutput
from quire.frontend.parsing.output_parser import OutputParser
from quire.frontend.parsing.tools import Tool, ToolChoice
from quire.frontend.server_config import ServerConfig
from quire.frontend.serving_defaults import with_serving_defaults
from quire.frontend.tokenizer import Tokenizer

INLINE_CHARACTERS = 32_768
"""Longer conversations are rendered in a thread (a fraction of a millisecond for this many)."""


class Rendered(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


class Choice:
    """Reads the outputs of one of n sequences.

    Args:
        parser: None when the text is the answer as it stands.
        max_calls: calls beyond this many are left out.
    """

    def __init__(self, parser: OutputParser | None, *, max_calls: int | None = None) -> None:
        self._parser = parser
        self._max_calls = max_calls

    def read(self, output: CompletionOutput) -> list[Event]:
        """Events for what is new, with a `Finish` at the end."""
        reason, parser = output.finish_reason, self._parser
        if parser is None:
            events: list[Event] = [TextDelta(output.text)] if output.text else []
        else:
            events = parser.push(output.text, output.token_ids)
            if reason is not None:
                events += parser.finish()
                reason = "tool_calls" if reason == "stop" and parser.num_tool_calls else reason
            if self._max_calls is not None:
                events = [event for event in events if not self._is_too_many(event)]
        if reason is not None:
            events.append(Finish(reason, output.stop_reason))  # type: ignore[arg-type]
        return events

    def _is_too_many(self, event: Event) -> bool:
        calls = ToolCallStart | ToolCallArguments | ToolCallEnd
        return isinstance(event, calls) and self._max_calls is not None and event.index >= self._max_calls


class Turn:
    """One answer while it is made. Close it when it is not read to its end: that aborts the request.

    Args:
        choices: a reader for each sequence; None when every text is the answer as it stands.
    """

    def __init__(self, stream: OutputStream, prompt: Rendered, choices: list[Choice] | None, llm: AsyncLLM) -> None:
        self.stream = stream
        self.choices = choices
        self.num_prompt_tokens = len(prompt.token_ids)
        self._llm = llm

    def close(self) -> None:
        """Aborts what still runs. Harmless at the end."""
        self.stream.close()

    async def events(self) -> AsyncGenerator[tuple[CompletionOutput, list[Event]], None]:
        """What each output of a single sequence brings; the last list ends with `Finish` and `Usage`.

        Raises:
            QuireError: the engine refused the request, or failed.
        """
        [choice] = self.choices or [Choice(None)]
        num_tokens, reasoning = 0, ""
        async for output in self.stream:
            [part] = output.outputs
            num_tokens += len(part.token_ids)
            events = choice.read(part)
            reasoning += "".join(event.text for event in events if isinstance(event, ReasoningDelta))
            if output.finished:
                cached = output.num_cached_tokens or 0
                events.append(Usage(self.num_prompt_tokens, num_tokens, cached, self._count(reasoning, num_tokens)))
            yield part, events

    def _count(self, reasoning: str, num_tokens: int) -> int:
        """Tokens of the reasoning: counted by the tokenizer, which splits a text as the model most likely did."""
        if not reasoning:
            return 0
        tokenizer = self._llm.input_processor.tokenizer
        return min(len(tokenizer.encode(reasoning, add_special_tokens=False)), num_tokens)


class Conversations:
    """Renders conversations and opens their answers."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig) -> None:
        self._engine = engine
        self._server = server
        self._template = server.read_chat_template()
        self._parsers = with_serving_defaults(server, Path(engine.model.folder)).make_output_parsers()
        self._marks_are_special = _any_special(self._parsers.markers, engine.tokenizer)

    async def render(self, request: ChatRequest | TokenizeRequest) -> Rendered:
        """The prompt.

        Raises:
            ParameterError: the conversation cannot be rendered, by field.
        """
        if _num_characters(request.messages or []) > INLINE_CHARACTERS:
            text = await asyncio.to_thread(self._render, request)
        else:
            text = self._render(request)
        special = bool(request.add_special_tokens)
        return Rendered(text, await self._engine.input_processor.tokenize(text, add_special_tokens=special))

    def _render(self, request: ChatRequest | TokenizeRequest) -> str:
        if request.chat_template is not None and not self._server.trust_request_chat_template:
            raise ParameterError(
                "This server does not run clients' chat templates; its --trust-request-chat-template lets it. "
                "chat_template_kwargs may be sent.",
                param="chat_template",
            )
        tools = request.tools
        variables = {**(self._server.default_chat_template_kwargs or {})}
        if isinstance(request, ChatRequest):
            variables |= _reasoning_variables(request.reasoning_effort)
            if request.tool_choice == "none" and self._server.exclude_tools_when_tool_choice_none:
                tools = None
        return self._engine.input_processor.render_chat(
            request.messages or [],
            tools=tools,
            documents=request.documents if isinstance(request, ChatRequest) else None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            chat_template=request.chat_template or self._template,
            content_format=self._server.chat_template_content_format,
            chat_template_kwargs={**variables, **(request.chat_template_kwargs or {})},
        )

    def sampling(self, request: ChatRequest) -> SamplingParams:
        """How the answer is sampled, but for what tools ask for. Raises ParameterError."""
        defaults = self._engine.input_processor.default_sampling
        _, limit = request.token_limit
        return request.make_sampling(
            defaults,
            max_tokens=limit if limit is not None else defaults.get("max_tokens"),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    async def open(
        self, request: ChatRequest, reply_id: str, *, prompt: Rendered | None = None, max_calls: int | None = None
    ) -> Turn:
        """Hands the conversation to the engine.

        Args:
            prompt: the request rendered before, if it was.
            max_calls: tool calls beyond this many are left out.

        Raises:
            ParameterError: the request cannot be served as asked, by field.
            EngineError: the engine cannot take requests.
        """
        prompt = prompt or await self.render(request)
        tools = read_tools(request.tools)
        choice = read_tool_choice(request.tool_choice, tools, parallel=request.parallel_tool_calls)
        if choice.mode == "auto" and not self._parsers.finds_calls:
            raise ParameterError(
                "This server cannot tell the model's calls from its text: start it with --enable-auto-tool-choice and "
                "--tool-call-parser, or set tool_choice to none.",
                param="tool_choice",
            )
        request_id = engine_id(reply_id)
        if self._engine.model.log_requests:
            log_prompt(request_id, prompt.text, self._server.max_log_len)
        names = {
            "max_tokens": request.token_limit[0],
            "prompt": "messages",
            "logprobs": "top_logprobs",
            **request.format_names(),
        }
        with renamed(**names):
            thinks = self._server.reasoning_parser is not None or _asks_to_think(request)
            sampling = self._constrain(self.sampling(request), tools, choice, prompt, thinks=thinks)
            stream = await self._open_stream(request, prompt, sampling, request_id)
        return Turn(stream, prompt, self._choices(request, prompt, tools, choice, max_calls), self._engine)

    async def _open_stream(
        self, request: ChatRequest, prompt: Rendered, sampling: SamplingParams, request_id: str
    ) -> OutputStream:
        sampling = self._with_marks(sampling, prompt.text)
        ids: PromptLike = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}
        if request.use_beam_search:
            limit = sampling.max_tokens or self._engine.max_model_len - len(prompt.token_ids)
            return await open_beams(self._engine, request, ids, request_id, max_tokens=limit)
        return await self._engine.open(
            ids,
            sampling,
            request_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            truncation=request.truncation,
            fit_context=request.token_limit[1] is None,
        )

    def _with_marks(self, sampling: SamplingParams, prompt_text: str) -> SamplingParams:
        """Tells a request with a budget for reasoning how that is set apart."""
        tokenizer = self._engine.tokenizer
        if sampling.thinking_token_budget is None or tokenizer is None:
            return sampling
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        return sampling.replace(thinking=self._parsers.thinking_marks(prompt_text, encode))

    def _constrain(
        self, sampling: SamplingParams, tools: list[Tool], choice: ToolChoice, prompt: Rendered, *, thinks: bool
    ) -> SamplingParams:
        """Holds calls that are asked for to their schemas, and keeps the marks of calls and reasoning in the text.

        Args:
            thinks: the model may open reasoning by itself before it comes to what is asked for.
        """
        asked = sampling.structured_outputs
        if tools and (calls := self._parsers.constraint(tools, choice)) is not None:
            asked = constraints.of_calls(calls)
        if asked is not None:
            marks = self._parsers.reasoning_marks(prompt.text)
            if marks is not None and marks.begin is not None and not thinks:
                marks = None
            sampling = sampling.replace(structured_outputs=constraints.after_reasoning(asked, marks))
        return sampling.replace(skip_special_tokens=False) if self._marks_are_special else sampling

    def _choices(
        self, request: ChatRequest, prompt: Rendered, tools: list[Tool], choice: ToolChoice, max_calls: int | None
    ) -> list[Choice] | None:
        """What reads each sequence; None when all texts are the answers as they stand."""

        def parser() -> OutputParser | None:
            told = request.include_reasoning is not False
            return self._parsers.open(tools, choice, prompt_text=prompt.text, include_reasoning=told)

        first = parser()
        if first is None:
            return None
        others = [parser() for _ in range(1, request.n or 1)]
        return [Choice(each, max_calls=max_calls) for each in (first, *others)]


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors about a field of ours speak of the client's field: `renamed(max_tokens="max_output_tokens")`."""
    try:
        yield
    except ParameterError as error:
        message = str(error)
        for name, theirs in names.items():
            if "_" in name:  # others are words of the language, too
                message = re.sub(rf"\b{name}\b", theirs, message)
        raise ParameterError(message, param=names.get(error.param or "", error.param)) from None


def _any_special(marks: Iterable[str], tokenizer: Tokenizer | None) -> bool:
    """Whether the tokenizer has one of these as a special token, which texts leave out."""
    return tokenizer is not None and any(tokenizer.token_id(mark) in tokenizer.special_token_ids for mark in marks)


def _reasoning_variables(effort: str | None) -> dict[str, Any]:
    """What templates call it: some read the effort, others only whether to think at all."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _asks_to_think(request: ChatRequest) -> bool:
    variables = {**_reasoning_variables(request.reasoning_effort), **(request.chat_template_kwargs or {})}
    return bool(variables.get("enable_thinking"))


def _num_characters(messages: Sequence[dict[str, Any]]) -> int:
    """Roughly how much there is to render; content that is no string counts per part."""
    return sum(len(content) if isinstance(content := each.get("content"), str) else 1000 for each in messages)
