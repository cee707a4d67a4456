"""The model's answer to a conversation, as events that every protocol renders in its own words.

A chat request is the one form of a conversation inside the server: the other protocols translate theirs into it.
"""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat import constraints
from quire.frontend.chat.tool_fields import read_tool_choice, read_tools
from quire.frontend.chat.turn import Choice, Rendered, Turn
from quire.frontend.checkpoint.serving_defaults import with_serving_defaults
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.beams import open_beams
from quire.frontend.openai.generation import OutputStream, engine_id, log_prompt
from quire.frontend.openai.renaming import renamed
from quire.frontend.openai.schema import ChatRequest, TokenizeRequest
from quire.frontend.parsing.call_ids import CHAT_PREFIX
from quire.frontend.parsing.output_parser import OutputParser
from quire.frontend.parsing.tools import Tool, ToolChoice
from quire.frontend.requests.prompt import PromptLike
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.turns import in_turns

INLINE_CHARACTERS = 32_768
"""Longer conversations are rendered in a thread (a fraction of a millisecond for this many)."""


class Conversations:
    """Renders conversations and opens their answers."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig) -> None:
        self._engine = engine
        self._server = server
        self._template = server.read_chat_template()
        self._parsers = with_serving_defaults(server, Path(engine.model.folder)).make_output_parsers()
        self._special_ids = functools.lru_cache(maxsize=16)(self._find_special_ids)

    async def render(self, request: ChatRequest | TokenizeRequest, *, must_fit: bool = True) -> Rendered:
        """The prompt.

        Args:
            must_fit: refuse one that is longer than the context whatever its tokens are, without looking for them; not
                one that is to be cut.

        Raises:
            ParameterError: the conversation cannot be rendered, by field.
        """
        if _num_characters(request) > INLINE_CHARACTERS:
            text = await asyncio.to_thread(self._render, request)
        else:
            text = self._render(request)
        special = bool(request.add_special_tokens)
        tokenize = self._engine.async_tokenizer.tokenize
        with renamed(prompt="messages"):
            return Rendered(text, await tokenize(text, add_special_tokens=special, must_fit=must_fit))

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
        return self._engine.chat_templates.render(
            self._parsers.readable(request.messages or []),
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
        sampling_input = self._engine.sampling_input
        defaults = sampling_input.defaults
        _, limit = request.token_limit
        return request.make_sampling(
            defaults,
            max_tokens=sampling_input.limit_output(limit if limit is not None else defaults.get("max_tokens")),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    async def open(
        self,
        request: ChatRequest,
        reply_id: str,
        *,
        prompt: Rendered | None = None,
        max_calls: int | None = None,
        call_prefix: str = CHAT_PREFIX,
    ) -> Turn:
        """Hands the conversation to the engine.

        Args:
            prompt: the request rendered before, if it was.
            max_calls: the answer ends with this many tool calls; with one, if they may not be parallel.
            call_prefix: how ids of calls begin in the protocol.

        Raises:
            ParameterError: the request cannot be served as asked, by field.
            EngineError: the engine cannot take requests.
        """
        prompt = prompt or await self.render(request, must_fit=request.truncation is None)
        tools = read_tools(request.tools)
        max_calls = 1 if request.parallel_tool_calls is False else max_calls
        choice = read_tool_choice(request.tool_choice, tools, max_calls=max_calls)
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
            if not (tells_tokens := self._tells_tokens(request)):
                sampling = sampling.replace(logprobs=None, logprob_token_ids=None)
            stream = await self._open_stream(request, prompt, sampling, request_id)
        try:
            choices = await self._choices(request, prompt, tools, choice, stream, call_prefix)
        except BaseException:
            stream.close()
            raise
        reads = self._parsers.reads_reasoning
        return Turn(stream, prompt, choices, self._engine, reads_reasoning=reads, tells_tokens=tells_tokens)

    def _tells_tokens(self, request: ChatRequest) -> bool:
        """Not where reasoning is left out: which tokens are its own is known for its text only, once that is read."""
        return request.include_reasoning is not False or not self._parsers.reads_reasoning

    async def _open_stream(
        self, request: ChatRequest, prompt: Rendered, sampling: SamplingParams, request_id: str
    ) -> OutputStream:
        sampling = self.with_thinking_marks(sampling, prompt.text)
        ids: PromptLike = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}
        if request.use_beam_search:
            if sampling.structured_outputs is not None and request.format_field is None:
                raise ParameterError(
                    "Calls that are asked for and strict functions are held to a grammar, which does not go with "
                    "use_beam_search; leave one out.",
                    param="tools",
                )
            limit = sampling.max_tokens or self._engine.max_model_len - len(prompt.token_ids)
            shown = sampling.shown_special_token_ids or ()
            return await open_beams(
                self._engine,
                request,
                ids,
                request_id,
                max_tokens=limit,
                tells_logprobs=sampling.logprobs is not None,
                shown_special_token_ids=shown,
            )
        return await self._engine.open(
            ids,
            sampling,
            request_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            truncation=request.truncation,
            fit_context=request.token_limit[1] is None,
        )

    def with_thinking_marks(self, sampling: SamplingParams, prompt_text: str) -> SamplingParams:
        """Tells a request with a budget for reasoning how that is set apart, after a prompt of any kind."""
        tokenizer = self._engine.tokenizer
        if sampling.thinking_token_budget is None or tokenizer is None:
            return sampling
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        return sampling.replace(thinking=self._parsers.thinking_marks(prompt_text, encode))

    def _constrain(
        self, sampling: SamplingParams, tools: list[Tool], choice: ToolChoice, prompt: Rendered, *, thinks: bool
    ) -> SamplingParams:
        """Holds calls that are asked for to their schemas, and lets the parsers see what they need to see.

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
        if choice.max_calls is not None and choice.mode != "none":  # seen as they are made, to make nothing after them
            sampling = sampling.replace(output_kind=RequestOutputKind.DELTA)
        if special_ids := self._special_ids(self._parsers.markers(tools, choice)):
            sampling = sampling.replace(shown_special_token_ids=special_ids)
        return sampling

    def _find_special_ids(self, markers: tuple[str, ...]) -> list[int]:
        """The special tokens that markers are made of; texts leave out all others."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return []
        texts = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_token_ids}
        return sorted(token_id for token_id, text in texts.items() if text and any(text in mark for mark in markers))

    async def _choices(
        self,
        request: ChatRequest,
        prompt: Rendered,
        tools: list[Tool],
        choice: ToolChoice,
        stream: OutputStream,
        call_prefix: str,
    ) -> list[Choice] | None:
        """What reads each sequence; None when all texts are the answers as they stand."""

        def parser() -> OutputParser | None:
            return self._parsers.open(tools, choice, prompt_text=prompt.text, call_prefix=call_prefix)

        first = parser()
        if first is None:
            return None
        parsers = [first, *[parser() async for _ in in_turns(range(1, request.n or 1))]]
        if not isinstance(stream, RequestStream):  # a beam search, whose beams are told when they have ended
            stops: list[Callable[[], None] | None] = [None] * len(parsers)
        else:
            stops = [functools.partial(stream.stop, index) for index in range(len(parsers))]
        told = request.include_reasoning is not False
        return [Choice(each, stop, tells_reasoning=told) for each, stop in zip(parsers, stops, strict=True)]


def _reasoning_variables(effort: str | None) -> dict[str, Any]:
    """What templates call it: some read the effort, others only whether to think at all."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _asks_to_think(request: ChatRequest) -> bool:
    variables = {**_reasoning_variables(request.reasoning_effort), **(request.chat_template_kwargs or {})}
    return bool(variables.get("enable_thinking"))


def _num_characters(request: ChatRequest | TokenizeRequest) -> int:
    """Roughly how much there is to render; content of several parts counts per part."""
    contents = (each.get("content") or "" for each in request.messages or ())
    num_characters = sum(100 + (len(each) if isinstance(each, str) else 1000 * _num_parts(each)) for each in contents)
    documents = request.documents if isinstance(request, ChatRequest) else None
    return num_characters + 500 * (len(request.tools or ()) + len(documents or ()))


def _num_parts(content: Any) -> int:
    return len(content) if isinstance(content, list) else 1
