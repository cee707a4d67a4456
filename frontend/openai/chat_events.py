"""Events of an answer in the words of chat completions: a message as a whole, or the chunks of a stream."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from quire.frontend.chat.answer_events import Choice, Turn
from quire.frontend.chat.custom_tools import CustomCallInput, CustomCallStart
from quire.frontend.http.event_stream import DONE
from quire.frontend.openai.answers import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionUsage,
    CustomCall,
    CustomDelta,
    CustomToolCall,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from quire.frontend.openai.generation import Reply, TextEvent, event
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.schema import ChatRequest
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.parsing.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)


def read_message(role: str, events: Sequence[Event], *, is_forced: bool = False) -> tuple[ChatMessage, Finish]:
    """The message of all events of one choice, and its end, which is the last event.

    Args:
        is_forced: the client requires a call. A message of calls alone then has empty content, as vLLM's, and otherwise
            none.
    """
    texts, reasoning = [], []
    calls: list[ToolCall | CustomToolCall] = []
    *events, finish = events
    assert isinstance(finish, Finish)
    for each in events:
        match each:
            case TextDelta():
                texts.append(each.text)
            case ReasoningDelta():
                reasoning.append(each.text)
            case ToolCallStart():
                calls.append(ToolCall(id=each.id, function=FunctionCall(each.name, "")))
            case ToolCallArguments():
                calls[-1].function.arguments += each.text  # type: ignore[union-attr]
            case CustomCallStart():
                calls.append(CustomToolCall(id=each.id, custom=CustomCall(each.name, "")))
            case CustomCallInput():
                calls[-1].custom.input += each.text  # type: ignore[union-attr]
    thoughts = "".join(reasoning) or None
    content = "".join(texts)
    message = ChatMessage(
        role=role,
        content=content if content or is_forced or not calls else None,
        reasoning=thoughts,
        reasoning_content=thoughts,
        tool_calls=calls or UNSET,
    )
    return message, finish


def finish_reason_of(finish: Finish, request: ChatRequest) -> str:
    """The finish_reason of a choice: `stop` and not `tool_calls` if the client named the function to call."""
    return "stop" if finish.reason == "tool_calls" and request.names_call else finish.reason


def delta_of(event: Event) -> ChatDelta | None:
    """The delta that an event adds to the message; None when it adds nothing."""
    match event:
        case TextDelta():
            return ChatDelta(content=event.text)
        case ReasoningDelta():
            return ChatDelta(reasoning=event.text, reasoning_content=event.text)
        case ToolCallStart():
            function = FunctionDelta(name=event.name, arguments="")
            call = ToolCallDelta(index=event.index, id=event.id, type="function", function=function)
            return ChatDelta(tool_calls=[call])
        case ToolCallArguments():
            call = ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.text))
            return ChatDelta(tool_calls=[call])
        case CustomCallStart():
            custom = CustomDelta(name=event.name, input="")
            return ChatDelta(tool_calls=[ToolCallDelta(index=event.index, id=event.id, type="custom", custom=custom)])
        case CustomCallInput():
            return ChatDelta(tool_calls=[ToolCallDelta(index=event.index, custom=CustomDelta(input=event.text))])
        case _:
            return None


def merged(deltas: Sequence[ChatDelta]) -> ChatDelta:
    """One delta with the content of all of these, and one part for each call."""
    calls: dict[int, ToolCallDelta] = {}
    for each in deltas:
        for call in each.tool_calls or ():
            first = calls.setdefault(call.index, call)
            if first is call:
                continue
            if first.function is not None and call.function is not None:
                first.function.arguments = (first.function.arguments or "") + (call.function.arguments or "")
            if first.custom is not None and call.custom is not None:
                first.custom.input = (first.custom.input or "") + (call.custom.input or "")
    thoughts = "".join(each.reasoning or "" for each in deltas) or None
    return ChatDelta(
        content="".join(each.content or "" for each in deltas) or None,
        reasoning=thoughts,
        reasoning_content=thoughts,
        tool_calls=list(calls.values()) or None,
    )


class ChatChunks:
    """Turns the outputs of one request into chunks, and counts tokens on the way.

    Args:
        turn: the answer that the outputs belong to.
    """

    def __init__(
        self,
        request: ChatRequest,
        reply: Reply,
        role: str,
        formatter: LogprobFormatter,
        encoder: msgspec.json.Encoder,
        turn: Turn,
    ) -> None:
        self._request = request
        self._reply = reply
        self._role = role
        self._formatter = formatter
        self._encoder = encoder
        self._turn = turn
        self._readers = turn.choices
        self._echoed = request.echoed(role)
        self._return_prompt_ids = bool(request.return_token_ids)
        self._return_token_ids = self._return_prompt_ids and turn.shows_tokens
        self._num_choices = request.n or 1
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._num_tokens = [0] * self._num_choices
        self._is_role_sent = False
        self._is_begun = False
        self._text_only = not self._return_token_ids and not reply.continuous_usage
        self._text_events: dict[int, TextEvent] = {}  # by choice

    def open(self) -> bytes:
        """Events of the role, which need no output. They wait for the first output if they show the prompt's tokens."""
        if self._return_prompt_ids or self._reply.continuous_usage:
            return b""
        return b"".join(self._role_events(UNSET))

    def add(self, output: RequestOutput) -> bytes:
        """Events for the new part of an answer; empty without one."""
        frames = [] if self._is_begun else self._begin(output)
        for each in output.outputs:
            self._num_tokens[each.index] += len(each.token_ids)
            if self._turn.predicted is not None:
                self._turn.predicted.add(each.index, each.token_ids)
            if self._readers is not None:
                frames += self._read(each, self._readers[each.index])
            elif self._text_only and each.text and each.finish_reason is None and not each.logprobs:
                frames.append(self._text_event(each.index).fill(each.text))
            elif each.text or each.finish_reason or each.logprobs or (self._return_token_ids and each.token_ids):
                frames.append(self._frame([self._choice(each)]))
        return b"".join(frames)

    async def end(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        if not self._reply.include_usage:
            return DONE
        num_tokens = sum(self._num_tokens)
        usage = self._usage(num_tokens, await self._turn.count_reasoning(num_tokens))
        return self._frame([], usage=usage) + DONE

    def _begin(self, output: RequestOutput) -> list[bytes]:
        """Counts the prompt's tokens; returns the events of the role, unless they were sent before."""
        self._is_begun = True
        self._prompt_tokens = output.num_prompt_tokens
        self._cached_tokens = output.num_cached_tokens or 0
        if self._is_role_sent:
            return []
        return self._role_events(output.prompt_token_ids if self._return_prompt_ids else UNSET)

    def _role_events(self, ids: list[int] | msgspec.UnsetType) -> list[bytes]:
        """One event per choice with the role, and one with the echoed text."""
        self._is_role_sent = True
        delta = ChatDelta(role=self._role, content="")
        frames = [
            self._frame([ChatChunkChoice(index=index, delta=delta)], prompt_token_ids=ids)
            for index in range(self._num_choices)
        ]
        if self._echoed:
            delta = ChatDelta(content=self._echoed)
            frames += [self._frame([ChatChunkChoice(index=index, delta=delta)]) for index in range(self._num_choices)]
        return frames

    def _text_event(self, index: int) -> TextEvent:
        event = self._text_events.get(index)
        if event is None:
            empty = ChatChunkChoice(index=index, delta=ChatDelta(content=""))
            event = self._text_events[index] = TextEvent(self._frame([empty]), "content", self._encoder)
        return event

    def _read(self, each: CompletionOutput, reader: Choice) -> list[bytes]:
        """Chunks for the events of one output. The first also carries log-probabilities and ids, the last the end."""
        events = reader.read(each)
        if self._text_only and not each.logprobs and len(events) == 1 and isinstance(events[0], TextDelta):
            return [self._text_event(each.index).fill(events[0].text)]
        finish = events.pop() if events and isinstance(events[-1], Finish) else None
        deltas = [delta for event in events if (delta := delta_of(event)) is not None]
        if not deltas and (finish or each.logprobs or (self._return_token_ids and each.token_ids)):
            deltas = [ChatDelta()]
        choices = [ChatChunkChoice(index=each.index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs = self._formatter.chat(each.logprobs) if each.logprobs else None
            choices[0].token_ids = each.token_ids if self._return_token_ids else UNSET
        if isinstance(finish, Finish):
            choices[-1].finish_reason = finish_reason_of(finish, self._request)
            choices[-1].stop_reason = finish.stop_reason
            choices[-1].weight_versions = self._request.weight_versions(self._num_tokens[each.index])
        return [self._frame([choice]) for choice in choices]

    def _choice(self, each: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=each.index,
            delta=ChatDelta(content=each.text),
            logprobs=self._formatter.chat(each.logprobs) if each.logprobs else None,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason if each.finish_reason else UNSET,
            token_ids=each.token_ids if self._return_token_ids else UNSET,
            weight_versions=(
                self._request.weight_versions(self._num_tokens[each.index]) if each.finish_reason else UNSET
            ),
        )

    def _frame(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: CompletionUsage | None = None,
        prompt_token_ids: list[int] | msgspec.UnsetType = UNSET,
    ) -> bytes:
        reply = self._reply
        if usage is None and reply.continuous_usage:
            [choice] = choices
            usage = self._usage(self._num_tokens[choice.index])
        chunk = ChatChunk(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=choices,
            system_fingerprint=reply.fingerprint_of(choices),
            usage=usage if reply.include_usage else UNSET,
            prompt_token_ids=prompt_token_ids,
        )
        return event(chunk, self._encoder)

    def _usage(self, num_tokens: int, num_reasoning: int | None = None) -> CompletionUsage:
        predicted = self._turn.predicted
        prediction = None if predicted is None else predicted.counts
        return self._reply.usage(Usage(self._prompt_tokens, num_tokens, self._cached_tokens, num_reasoning, prediction))
