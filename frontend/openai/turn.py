"""One answer of the model while it is made: outputs of the engine in, events out."""

from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.events import Event, Finish, ReasoningDelta, TextDelta, Usage
from quire.frontend.openai.generation import OutputStream
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.parsing.output_parser import OutputParser
from quire.frontend.turns import in_turns


class Rendered(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


class Choice:
    """Reads the outputs of one of n sequences.

    Args:
        parser: None when the text is the answer as it stands.
        stop: ends the sequence, once it has made all calls that it may make; None for one that ends by itself.
    """

    def __init__(self, parser: OutputParser | None, stop: Callable[[], None] | None = None) -> None:
        self._parser = parser
        self._stop = stop

    def read(self, output: CompletionOutput) -> list[Event]:
        """Events for what is new, with a `Finish` at the end."""
        reason, stop_reason, parser = output.finish_reason, output.stop_reason, self._parser
        if parser is None:
            events: list[Event] = [TextDelta(output.text)] if output.text else []
        else:
            events = parser.push(output.text, output.token_ids)
            complete = parser.is_complete
            if reason is None:
                if complete and self._stop is not None:
                    self._stop()
            else:
                events += parser.finish()
                if complete:  # whatever ended what came after the last call
                    reason, stop_reason = "tool_calls", None
                elif reason == "stop" and parser.num_tool_calls:
                    reason = "tool_calls"
        if reason is not None:
            events.append(Finish(reason, stop_reason))  # type: ignore[arg-type]
        return events


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

    async def whole(self) -> tuple[RequestOutput, list[list[Event]] | None]:
        """All outputs as one, and the events of each sequence; no events when every text is the answer as it stands.

        Raises:
            QuireError: the engine refused the request, or failed.
        """
        events: list[list[Event]] | None = None if self.choices is None else [[] for _ in self.choices]
        parts: dict[int, CompletionOutput] = {}
        async for output in self.stream:
            async for part in in_turns(output.outputs):
                if self.choices is not None and events is not None:
                    events[part.index] += self.choices[part.index].read(part)
                before = parts.setdefault(part.index, part)
                if before is not part:
                    _extend(before, part)
            last = output
        last.outputs = [parts[index] for index in sorted(parts)]
        return last, events

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


def _extend(part: CompletionOutput, more: CompletionOutput) -> None:
    """Appends what a sequence made next."""
    part.text += more.text
    part.token_ids += more.token_ids
    if part.logprobs is not None:
        part.logprobs += more.logprobs or []
    part.cumulative_logprob = more.cumulative_logprob
    part.finish_reason, part.stop_reason = more.finish_reason, more.stop_reason
