"""One answer of the model while it is generated: outputs of the engine in, events out."""

from collections.abc import AsyncGenerator, Callable, Sequence

from quire.frontend.chat.custom_tools import CustomCalls
from quire.frontend.chat.predicted_output import PredictedOutput
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.parsing.answers.output_parser import OutputParser
from quire.frontend.parsing.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from quire.frontend.parsing.reader import TextEnd
from quire.frontend.requests.async_tokenizer import INLINE_CHARACTERS
from quire.frontend.requests.merging import OutputStream
from quire.frontend.requests.time_slices import in_thread_if_long, in_time_slices
from quire.frontend.text.tokenizer import Tokenizer


class Choice:
    """Reads the outputs of one of n sequences.

    Args:
        parser: None when the text is the answer unchanged.
        custom_calls: finds calls of custom tools among those of functions; None where no such tools are offered.
        count_search: counts whether a call was found, once for each piece of text in `streaming` answers, else once.
        shows_reasoning: False drops reasoning from the events.
        always_answers: reasoning becomes the answer at the end of a text that has neither an answer nor a call.
    """

    def __init__(
        self,
        parser: OutputParser | None,
        *,
        custom_calls: CustomCalls | None = None,
        count_search: Callable[[bool], None] | None = None,
        streaming: bool = False,
        shows_reasoning: bool = True,
        always_answers: bool = False,
    ) -> None:
        self._parser = parser
        self._taken: list[Event] | None = None  # events of text that was taken and not yet read; None: none is taken
        self._error: Exception | None = None
        self._custom_calls = custom_calls
        self._count_search = count_search
        self._streaming = streaming
        self._shows_reasoning = shows_reasoning
        self._reasoning: list[str] = []
        self._needs_answer = always_answers
        self.answers_with_reasoning = False

    @property
    def reasoning(self) -> str:
        """The reasoning so far, whether or not the client gets it."""
        return "".join(self._reasoning)

    def take(self, text: str, token_ids: Sequence[int]) -> bool:
        """Takes text as it arrives, for the next `read`. True once the answer has as many calls as it may have.

        So an answer ends with the same token, however busy its reader is.
        """
        assert self._parser is not None
        self._taken = self._taken or []
        try:
            self._taken += self._parser.push(text, token_ids)
        except Exception as error:  # its reader raises it, not whoever brought the text
            self._error = error
        return self._parser.is_complete or self._error is not None

    def read(self, output: CompletionOutput) -> list[Event]:
        """Events for the new text, with a `Finish` at the end."""
        reason, stop_reason, parser = output.finish_reason, output.stop_reason, self._parser
        if parser is None:
            events: list[Event] = [TextDelta(output.text)] if output.text else []
        else:
            events = self._parsed(parser, output)
            if reason is not None:
                complete = parser.is_complete
                events += parser.finish(_end(reason, stop_reason))
                if complete:  # whatever ended the text after the last call
                    reason, stop_reason = "tool_calls", None
                elif reason == "stop" and parser.num_tool_calls and not parser.ends_within_call:
                    reason = "tool_calls"
            self._count(parser, events, ended=reason is not None)
            events = self._keep_reasoning(events)
            if self._needs_answer:
                self._look_for_answer(events, ended=reason is not None)
            if self._custom_calls is not None:
                events = self._custom_calls.read(events)
        if reason is not None:
            events.append(Finish(reason, stop_reason))  # type: ignore[arg-type]
        return events

    def read_whole(self, output: CompletionOutput) -> list[Event]:
        """Events of a whole output. Reasoning that is the answer becomes text alone."""
        events = self.read(output)
        if self.answers_with_reasoning:
            return [event for event in events if not isinstance(event, ReasoningDelta)]
        return events

    def _parsed(self, parser: OutputParser, output: CompletionOutput) -> list[Event]:
        """The events of an output's text, which may have been taken before."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # whose traceback leads here
        if self._taken is None:
            return parser.push(output.text, output.token_ids)
        events, self._taken = self._taken, []
        return events

    def _count(self, parser: OutputParser, events: list[Event], *, ended: bool) -> None:
        """Counts the search of this piece for calls; reasoning is not searched."""
        if self._count_search is None or (not self._streaming and not ended):
            return
        if not self._streaming:
            self._count_search(parser.num_tool_calls > 0)
        elif not events or not all(isinstance(event, ReasoningDelta) for event in events):
            self._count_search(any(isinstance(each, ToolCallStart | ToolCallArguments) for each in events))

    def _keep_reasoning(self, events: list[Event]) -> list[Event]:
        thoughts = [event.text for event in events if isinstance(event, ReasoningDelta)]
        self._reasoning += thoughts
        if self._shows_reasoning or not thoughts:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _look_for_answer(self, events: list[Event], *, ended: bool) -> None:
        """Adds the reasoning as the answer, if the text ended without one."""
        self._needs_answer = not any(
            isinstance(each, ToolCallStart) or (isinstance(each, TextDelta) and each.text.strip()) for each in events
        )
        if ended and self._needs_answer and self._reasoning:
            events.append(TextDelta(self.reasoning))
            self.answers_with_reasoning = True


class Turn:
    """One answer while it is generated. A caller that does not read it to its end closes it, which aborts the request.

    Args:
        num_prompt_tokens: length of the conversation's prompt.
        choices: a reader for each sequence; None when every text is the answer unchanged.
        tokenizer: counts the tokens of reasoning.
        reads_reasoning: the readers separate reasoning from the answer.
        shows_tokens: False when the client must not see the answer's tokens, because they include hidden reasoning.
        predicted: what the client predicts; None: nothing.
    """

    def __init__(
        self,
        stream: OutputStream,
        num_prompt_tokens: int,
        choices: list[Choice] | None,
        tokenizer: Tokenizer,
        *,
        reads_reasoning: bool = False,
        shows_tokens: bool = True,
        predicted: PredictedOutput | None = None,
    ) -> None:
        self.stream = stream
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self.shows_tokens = shows_tokens
        self.predicted = predicted
        self._reads_reasoning = reads_reasoning
        self._tokenizer = tokenizer

    def close(self) -> None:
        """Aborts what still runs. Harmless at the end."""
        self.stream.close()

    async def whole(self) -> tuple[RequestOutput, list[list[Event]] | None]:
        """All outputs as one, and the events of each sequence; no events when every text is the answer unchanged.

        Raises:
            QuireError: the engine refused the request, or failed.
        """
        events: list[list[Event]] | None = None if self.choices is None else [[] for _ in self.choices]
        parts: dict[int, CompletionOutput] = {}
        async for output in self.stream:
            async for part in in_time_slices(output.outputs):
                if self.choices is not None and events is not None:
                    events[part.index] += self.choices[part.index].read(part)
                    if self.choices[part.index].answers_with_reasoning:
                        events[part.index] = [e for e in events[part.index] if not isinstance(e, ReasoningDelta)]
                before = parts.setdefault(part.index, part)
                if before is not part:
                    _extend(before, part)
            last = output
        last.outputs = [parts[index] for index in sorted(parts)]
        return last, events

    async def events(self) -> AsyncGenerator[tuple[CompletionOutput, list[Event]], None]:
        """(output, its events) of a single sequence, in order; the last list ends with `Finish` and `Usage`.

        Raises:
            QuireError: the engine refused the request, or failed.
        """
        [choice] = self.choices or [Choice(None)]
        num_tokens = 0
        async for output in self.stream:
            [part] = output.outputs
            num_tokens += len(part.token_ids)
            events = choice.read(part)
            if output.finished:
                cached = output.num_cached_tokens or 0
                num_reasoning = await self.count_reasoning(num_tokens)
                events.append(Usage(self.num_prompt_tokens, num_tokens, cached, num_reasoning))
            yield part, events

    async def count_reasoning(self, num_tokens: int) -> int | None:
        """Tokens of all reasoning so far, out of `num_tokens`; None when reasoning is not separated.

        The tokenizer counts them: it splits a text as the model most likely did.
        """
        if not self._reads_reasoning:
            return None
        encode = self._tokenizer.encode
        texts = [text for choice in self.choices or () if (text := choice.reasoning)]

        def count() -> int:
            return sum(len(encode(text, add_special_tokens=False)) for text in texts)

        return min(await in_thread_if_long(count, is_long=sum(map(len, texts)) > INLINE_CHARACTERS), num_tokens)


def _end(reason: str, stop_reason: int | str | None) -> TextEnd:
    """Returns what ended a text. A stop token is the model's own end, also if the client named it."""
    if reason != "stop":
        return "limit"
    return "stop" if isinstance(stop_reason, str) else "model"


def _extend(part: CompletionOutput, more: CompletionOutput) -> None:
    """Appends the next output of a sequence."""
    part.text += more.text
    part.token_ids += more.token_ids
    if part.logprobs is not None:
        part.logprobs.extend(more.logprobs or [])
    part.cumulative_logprob = more.cumulative_logprob
    part.finish_reason, part.stop_reason = more.finish_reason, more.stop_reason
