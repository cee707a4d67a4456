"""Builds a message out of an answer's events, block by block, and the frames of its stream."""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.errors import EngineError
from quire.frontend.anthropic.answers import (
    Block,
    MessageAnswer,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from quire.frontend.http.event_stream import event_frame
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


class MessageBuilder:
    """Builds a message from events.

    Args:
        message: has the fields known before the model answers; the builder fills in the others.
    """

    def __init__(self, message: MessageAnswer) -> None:
        self.message = message
        self._block: Block | None = None  # the block that grows
        self._pieces: list[str] = []  # its text so far

    def start(self) -> list[bytes]:
        """The first frames of a stream."""
        return [_frame("message_start", message=self.message), _frame("ping")]

    def add(self, events: Sequence[Event]) -> list[bytes]:
        """Frames for the events of one output. Raises EngineError when the answer cannot be finished."""
        frames: list[bytes] = []
        for event in events:
            match event:
                case TextDelta():
                    if not isinstance(self._block, TextBlock):
                        frames += self._open(TextBlock())
                    frames.append(self._delta(event.text, {"type": "text_delta", "text": event.text}))
                case ReasoningDelta():
                    if not isinstance(self._block, ThinkingBlock):
                        frames += self._open(ThinkingBlock())
                    frames.append(self._delta(event.text, {"type": "thinking_delta", "thinking": event.text}))
                case ToolCallStart():
                    frames += self._open(ToolUseBlock(id=event.id, name=event.name))
                case ToolCallArguments():
                    delta = {"type": "input_json_delta", "partial_json": event.text}
                    frames.append(self._delta(event.text, delta))
                case ToolCallEnd():
                    frames += self._close()
                case Finish():
                    frames += self._close()
                    self._finish(event)
                case Usage():
                    self.message.usage = self._usage(event)
        return frames

    def end(self) -> list[bytes]:
        """The last frames, after the last event."""
        delta = {"stop_reason": self.message.stop_reason, "stop_sequence": self.message.stop_sequence}
        return [_frame("message_delta", delta=delta, usage=self.message.usage), _frame("message_stop")]

    # ------------------------------------------------------------------------------------------------------- blocks

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _open(self, block: Block) -> list[bytes]:
        frames = self._close()
        self._block = block
        self.message.content.append(block)
        return [*frames, _frame("content_block_start", index=self._index, content_block=block)]

    def _delta(self, text: str, delta: dict[str, Any]) -> bytes:
        self._pieces.append(text)
        return _frame("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        block, text = self._block, "".join(self._pieces)
        if block is None:
            return []
        self._block, self._pieces = None, []
        frames = []
        if isinstance(block, ToolUseBlock):
            block.input = _parse(text)
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
            signature = {"type": "signature_delta", "signature": block.signature}
            frames.append(_frame("content_block_delta", index=self._index, delta=signature))
        else:
            block.text = text
        return [*frames, _frame("content_block_stop", index=self._index)]

    def _finish(self, finish: Finish) -> None:
        reason: StopReason = "end_turn"
        match finish.reason:
            case "length" | "repetition":  # cut short: the protocol has one reason that fits both
                reason = "max_tokens"
            case "tool_calls":
                reason = "tool_use"
            case "abort" | "error":  # the protocol has no such stop_reason, only an error
                raise EngineError("The answer was ended by the server.")
            case _ if isinstance(finish.stop_reason, str):
                reason = "stop_sequence"
                self.message.stop_sequence = finish.stop_reason
        self.message.stop_reason = reason

    def _usage(self, usage: Usage) -> MessageUsage:
        return MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached_tokens,
        )


def _parse(arguments: str) -> Any:
    """Arguments as an object, which is empty when they were cut short: `stop_reason` then is not "tool_use"."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}


def _frame(kind: str, **fields: Any) -> bytes:
    return event_frame(_encode({"type": kind, **fields}), kind)
