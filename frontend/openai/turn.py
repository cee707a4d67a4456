"""One answer of the model while it is made: outputs of the engine in, events out."""

from collections.abc import AsyncGenerator
from typing import NamedTuple

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
from quire.frontend.openai.generation import OutputStream
from quire.frontend.outputs import CompletionOutput
from quire.frontend.parsing.output_parser import OutputParser


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
