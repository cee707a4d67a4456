"""One event of a stream that is derendered: reads the earlier tokens again, and returns the new part."""

import msgspec
from msgspec import UNSET, Struct

from quire.frontend.chat.answer_events import Choice
from quire.frontend.openai.answers import ChatChunkChoice, ChatDelta, CompletionChunkChoice
from quire.frontend.openai.chat_events import delta_of, finish_reason_of, merged
from quire.frontend.openai.derender_bodies import GivenPart, StreamState
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.outputs import CompletionOutput, Logprob
from quire.frontend.parsing.events import Finish
from quire.frontend.requests.replay import Replay

Rows = list[dict[int, Logprob]] | None


class ChatPart(Struct):
    """Reads and writes one choice of a conversation's answer."""

    request: ChatRequest
    reader: Choice
    replay: Replay
    formatter: LogprobFormatter
    role: str
    shows_tokens: bool

    def read(self, state: StreamState, part: GivenPart, rows: Rows) -> tuple[ChatChunkChoice, StreamState]:
        """The event's choice, and the state after it."""
        for token_ids in state.chunks():
            self.reader.read(self.replay.push(token_ids))
        output = read_part(self.replay, part)
        events = self.reader.read(output)
        finish = events.pop() if events and isinstance(events[-1], Finish) else None
        delta = merged([delta for each in events if (delta := delta_of(each)) is not None])
        if not state.role_sent:
            delta.role = self.role
            if echoed := self.request.echoed(self.role):
                delta.content = echoed + (delta.content or "")
        ids = pin_ids(delta, state.last_tool_call_ids)
        choice = ChatChunkChoice(index=part.index, delta=delta)
        if self.shows_tokens:
            choice.logprobs = None if rows is None else self.formatter.chat(rows)
            choice.token_ids = output.token_ids if self.request.return_token_ids else UNSET
        if isinstance(finish, Finish):
            choice.finish_reason, choice.stop_reason = finish_reason_of(finish, self.request), finish.stop_reason
            num_tokens = len(state.output_token_ids) + len(output.token_ids)
            choice.weight_versions = self.request.weight_versions(num_tokens)
        behind = msgspec.structs.replace(after(state, part), role_sent=True, last_tool_call_ids=ids)
        return choice, behind


def completion_part(
    request: CompletionRequest,
    replay: Replay,
    formatter: LogprobFormatter,
    state: StreamState,
    part: GivenPart,
    rows: Rows,
) -> tuple[CompletionChunkChoice, StreamState]:
    """The event's choice of a text completion, and the state after it."""
    if state.output_token_ids:
        replay.push(state.output_token_ids)
    output = read_part(replay, part)
    offset = state.logprob_text_offset
    logprobs = None if rows is None else formatter.completion(rows, offset)
    told = len(output.text) if logprobs is None else sum(map(len, logprobs.tokens))
    num_tokens = len(state.output_token_ids) + len(output.token_ids)
    choice = CompletionChunkChoice(
        index=part.index,
        text=output.text,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=output.token_ids if request.return_token_ids else UNSET,
        weight_versions=request.weight_versions(num_tokens) if output.finish_reason else UNSET,
    )
    return choice, msgspec.structs.replace(after(state, part), logprob_text_offset=offset + told)


def read_part(replay: Replay, part: GivenPart) -> CompletionOutput:
    """The text of an event."""
    token_ids = part.token_ids or []
    if part.finish_reason is None:
        return replay.push(token_ids)
    return replay.finish(token_ids, part.finish_reason, part.stop_reason)


def after(state: StreamState, part: GivenPart) -> StreamState:
    """The state with an event's tokens."""
    if not part.token_ids:
        return state
    return msgspec.structs.replace(
        state,
        output_token_ids=state.output_token_ids + part.token_ids,
        output_chunk_lens=[*state.output_chunk_lens, len(part.token_ids)],
    )


def pin_ids(delta: ChatDelta, sent: list[str]) -> list[str]:
    """Gives the calls of a delta the ids that were sent before, and returns all ids sent so far.

    Each reading of the earlier tokens would otherwise make new random ids.
    """
    ids = list(sent)
    for call in delta.tool_calls or ():
        if call.id is None:
            continue
        if call.index < len(ids):
            call.id = ids[call.index]
        else:
            ids.append(call.id)
    return ids
