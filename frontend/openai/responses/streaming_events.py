"""Builds a response out of an answer's events, item by item, and the frames of its stream."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from quire.frontend.chat.custom_tools import CustomCallInput, CustomCallStart
from quire.frontend.http.event_stream import event_frame
from quire.frontend.openai.answers import TokenLogprob
from quire.frontend.openai.responses.answers import (
    CallItem,
    CustomCallItem,
    Incompleteness,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseFailure,
    ResponseUsage,
)
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.parsing.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

_encode = msgspec.json.Encoder().encode


class ResponseBuilder:
    """Builds a response from events.

    Args:
        response: has the fields known before the model answers; the builder fills in the others.
        tools: know the client's names for calls.
        encrypt: makes the `encrypted_content` of reasoning; None leaves it out.
    """

    def __init__(self, response: Response, tools: OfferedTools, encrypt: Callable[[str], str] | None) -> None:
        self.response = response
        self._tools = tools
        self._encrypt = encrypt
        self._item: OutputItem | None = None  # the item that grows
        self._pieces: list[str] = []  # its text so far
        self._logprobs: list[TokenLogprob] = []
        self._held: list[TokenLogprob] = []  # of text that the parser holds back, such as a space
        self._is_broken = False  # the arguments of the last call have no end
        self._sequence_number = 0

    def start(self) -> list[bytes]:
        """The first frames of a stream."""
        first = ["response.queued"] if self.response.status == "queued" else []
        frames = [self._frame("response.created", response=self.response)]
        frames += [self._frame(kind, response=self.response) for kind in first]
        self.response.status = "in_progress"
        return [*frames, self._frame("response.in_progress", response=self.response)]

    def add(self, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> list[bytes]:
        """Frames for the events of one output; `logprobs` belong to its text."""
        frames: list[bytes] = []
        if not events:
            self._held += logprobs if isinstance(self._item, MessageItem) else ()
            return frames
        logprobs, self._held = [*self._held, *logprobs], []
        for event in events:
            match event:
                case TextDelta():
                    if not isinstance(self._item, MessageItem):
                        frames += self._open(MessageItem(id=_new_id("msg")), OutputText())
                    frames.append(self._text_delta(event.text, logprobs))
                    logprobs = ()
                case ReasoningDelta():
                    if not isinstance(self._item, ReasoningItem):
                        frames += self._open(ReasoningItem(id=_new_id("rs")), ReasoningText())
                    frames.append(self._delta("response.reasoning_text.delta", event.text, content_index=0))
                case ToolCallStart() | CustomCallStart():
                    frames += self._open(self._call(event), None)
                case ToolCallArguments():
                    frames.append(self._delta("response.function_call_arguments.delta", event.text))
                case CustomCallInput():
                    frames.append(self._delta("response.custom_tool_call_input.delta", event.text))
                case ToolCallEnd():
                    self._is_broken = event.is_broken
                    if not event.is_cut:  # `Finish` shows if a cut call is complete
                        frames += self._close("completed")
                case Finish():
                    frames += self._finish(event)
                case Usage():
                    self.response.usage = response_usage(event)
        return frames

    def end(self) -> bytes:
        """The last frame, after the last event."""
        return self._frame(f"response.{self.response.status}", response=self.response)

    def fail(self, code: str, message: str) -> list[bytes]:
        """The last frames of a response that cannot be finished."""
        frames = self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseFailure(code, message)
        return [*frames, self.end()]

    # -------------------------------------------------------------------------------------------------------- items

    def _open(self, item: OutputItem, part: OutputText | ReasoningText | None) -> list[bytes]:
        frames = self._close("completed")
        self._item = item
        self.response.output.append(item)
        frames.append(self._frame("response.output_item.added", output_index=self._index, item=item))
        if part is not None:
            frames.append(self._part_frame("response.content_part.added", part))
        return frames

    def _call(self, start: ToolCallStart | CustomCallStart) -> CallItem | CustomCallItem:
        name, namespace = self._tools.called(start.name)
        fields: dict[str, Any] = {"call_id": start.id, "name": name, "namespace": namespace or UNSET}
        if isinstance(start, CustomCallStart):
            return CustomCallItem(id=_new_id("ctc"), **fields)
        return CallItem(id=_new_id("fc"), **fields)

    def _close(self, status: Any) -> list[bytes]:
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return []
        item.status = status
        part: OutputText | ReasoningText | None = None
        done: dict[str, Any]
        if isinstance(item, CallItem):
            item.arguments = text = text or "{}"
            done = {"kind": "response.function_call_arguments.done", "name": item.name, "arguments": text}
        elif isinstance(item, CustomCallItem):
            item.input = text
            done = {"kind": "response.custom_tool_call_input.done", "input": text}
        elif isinstance(item, MessageItem):
            part = OutputText(text=text, logprobs=self._logprobs)
            item.content = [part]
            done = {"kind": "response.output_text.done", "content_index": 0, "text": text, "logprobs": part.logprobs}
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            item.encrypted_content = self._encrypt(text) if self._encrypt is not None else None
            done = {"kind": "response.reasoning_text.done", "content_index": 0, "text": text}
        frames = [self._item_frame(**done)]
        if part is not None:
            frames.append(self._part_frame("response.content_part.done", part))
        frames.append(self._frame("response.output_item.done", output_index=self._index, item=item))
        self._item, self._pieces, self._logprobs = None, [], []
        return frames

    def _text_delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        self._logprobs += logprobs
        return self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        self._pieces.append(text)
        return self._item_frame(kind, delta=text, **fields)

    def _finish(self, finish: Finish) -> list[bytes]:
        match finish.reason:
            case "length" | "repetition":  # cut short: the protocol has one reason that fits both
                self.response.status = "incomplete"
                self.response.incomplete_details = Incompleteness("max_output_tokens")
            case "abort" | "error":
                self.response.status = "failed"
                self.response.error = ResponseFailure("server_error", "The answer was ended by the server.")
            case _:
                self.response.status = "completed"
        is_whole = self.response.status == "completed" and not self._is_broken
        return self._close("completed" if is_whole else "incomplete")

    # ------------------------------------------------------------------------------------------------------- frames

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _part_frame(self, kind: str, part: OutputText | ReasoningText) -> bytes:
        return self._item_frame(kind, content_index=0, part=part)

    def _item_frame(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        return self._frame(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _frame(self, kind: str, **fields: Any) -> bytes:
        body = _encode({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        return event_frame(body, kind)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def response_usage(usage: Usage) -> ResponseUsage:
    """Tokens of an answer, in the form of responses."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens or 0),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
