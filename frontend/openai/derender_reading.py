"""Reads answers of another server's /inference/v1/generate, after a check against this server's limits."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import MAX_COMPLETIONS, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.openai.derender_bodies import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GivenChunk,
    GivenPart,
    GivenResponse,
    StreamState,
)
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests.replay import Replay
from quire.frontend.requests.time_slices import in_thread_if_long
from quire.frontend.requests.token_logprobs import RowReader

INLINE_TOKENS = 4096
"""More tokens than this are read in a thread."""

T = TypeVar("T")


class GivenReader:
    """Turns tokens into outputs."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._max_model_len = engine.max_model_len
        self._max_logprobs = engine.model.max_logprobs
        self._vocab_size = engine.config.spec.vocab_size
        self._end_token_ids = frozenset(engine.config.spec.eos_token_ids)
        self._tokenizer = engine.async_tokenizer

    async def output(self, given: GivenResponse, prompt_ids: list[int], sampling: SamplingParams) -> RequestOutput:
        """A whole answer, as the engine would have given it; choices are numbered from 0. Raises ParameterError."""
        self.check_ids(prompt_ids, "prompt_token_ids")
        if len(given.choices) > MAX_COMPLETIONS:
            raise ParameterError(f"An answer may have {MAX_COMPLETIONS} choices.", param="choices")
        for each in given.choices:
            self._check_part(each)
            if not each.token_ids:
                raise ParameterError(f"Choice {each.index} has no token_ids.", param="token_ids")
        replay = self.replay(prompt_ids, sampling)

        def read() -> list[CompletionOutput]:
            outputs = []
            for index, each in enumerate(given.choices):
                output = replay.whole(each.token_ids or [], each.finish_reason or "stop", each.stop_reason)
                output.index, output.logprobs = index, self.rows(each, prompt_ids)
                outputs.append(output)
            return outputs

        num_tokens = sum(len(each.token_ids or ()) for each in given.choices)
        return RequestOutput(
            request_id=given.request_id,
            prompt=None,
            prompt_token_ids=prompt_ids,
            outputs=await in_thread_if_long(read, is_long=num_tokens > INLINE_TOKENS),
            finished=True,
            prompt_logprobs=given.prompt_logprobs,
            num_cached_tokens=None if given.usage is None else given.usage.cached_tokens,
        )

    def event(
        self, given: GivenChunk, state: StreamState | None, prompt_ids: list[int]
    ) -> tuple[StreamState, GivenPart | None]:
        """The state before an event, and the event's new part. Raises ParameterError."""
        state = state or StreamState()
        if len(given.choices) > 1:
            raise ParameterError(
                f"generate_chunk has {len(given.choices)} choices; an event of a stream has one.",
                param="generate_chunk",
            )
        self.check_ids(prompt_ids, "prompt_token_ids")
        self.check_ids(state.output_token_ids, "stream_state")
        state.chunks()
        part = given.choices[0] if given.choices else None
        if part is not None:
            self._check_part(part)
        num_new = len(part.token_ids or ()) if part is not None else 0
        counts = len(prompt_ids), len(state.output_token_ids), num_new
        if sum(counts) > self._max_model_len:
            raise ParameterError(
                f"{counts[0]} prompt_token_ids, {counts[1]} output_token_ids and {num_new} new ones are more than the "
                f"{self._max_model_len} tokens of max_model_len.",
                param="stream_state",
            )
        return state, part

    def replay(self, prompt_ids: list[int], sampling: SamplingParams) -> Replay:
        """A reader of one sequence's tokens."""
        return Replay(self._tokenizer.tokenizer, prompt_ids, sampling, self._end_token_ids)

    def rows(self, part: GivenPart, token_ids: Sequence[int]) -> list[dict[int, Logprob]] | None:
        """Log-probabilities after these tokens, with the tokens' texts."""
        if part.logprobs is None or part.logprobs.content is None:
            return None
        rows = [position.row() for position in part.logprobs.content]
        reader = RowReader(self._tokenizer.tokenizer, token_ids)
        for place, row in enumerate(rows, start=1):
            reader.spell(row, is_last=part.finish_reason is not None and place == len(rows))
        return rows

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuses tokens that the model does not have, and more than fit its context."""
        if len(token_ids) > self._max_model_len:
            raise ParameterError(
                f"{param} has {len(token_ids)} tokens, more than the {self._max_model_len} of max_model_len.",
                param=param,
            )
        self._check_known(token_ids, param)

    def _check_known(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and max(token_ids) >= self._vocab_size:
            raise ParameterError(
                f"{param} has the token {max(token_ids)}, which is outside the model's vocabulary (0 to "
                f"{self._vocab_size - 1}).",
                param=param,
            )

    def _check_part(self, part: GivenPart) -> None:
        self.check_ids(part.token_ids or (), "token_ids")
        content = (part.logprobs.content if part.logprobs is not None else None) or []
        for position in content:
            top = [each.token_id for each in position.top_logprobs]
            if 0 <= self._max_logprobs < len(top) - 1:  # the position's own token may follow the likeliest
                raise ParameterError(
                    f"top_logprobs has {len(top)} entries, more than --max-logprobs {self._max_logprobs} allows.",
                    param="logprobs",
                )
            self._check_known([position.token_id, *top], "logprobs")
        if len(content) > self._max_model_len:
            raise ParameterError(
                f"logprobs.content of choice {part.index} has {len(content)} entries, more than the "
                f"{self._max_model_len} tokens of max_model_len.",
                param="logprobs",
            )


def read_chat(request: DerenderChatRequest, num_choices: int) -> tuple[ChatRequest, ChatInput]:
    """The conversation that was rendered, as for an answer with a number of choices. Raises ParameterError."""
    asked = request.chat_request or ChatRequest(messages=[])
    msgspec.structs.replace(asked, return_token_offsets=None).check()
    chat = asked.to_chat_input()
    if not asked.logprobs:  # then the request has no number of them
        asked = msgspec.structs.replace(asked, top_logprobs=-1)
    return asked, msgspec.structs.replace(chat, sampling={**chat.sampling, "n": num_choices}, beams=None)


def read_text(request: DerenderCompletionRequest) -> CompletionRequest:
    """The request that was rendered. Raises ParameterError."""
    asked = request.completion_request or CompletionRequest()
    msgspec.structs.replace(asked, return_token_offsets=None).check()
    return asked if asked.logprobs is not None else msgspec.structs.replace(asked, logprobs=-1)


def check_stops(asked: ChatRequest | CompletionRequest, param: str) -> None:
    """Refuses stop strings of a stream, because text that was sent cannot be cut."""
    if asked.stop:
        raise ParameterError(
            "stop strings do not go with a stream that is derendered, because text that was told cannot be cut; "
            "derender the whole answer, or let /inference/v1/generate stream with output_mode text.",
            param=param,
        )


def required(value: T | None, param: str) -> T:
    """The value. Raises ParameterError for None."""
    if value is None:
        raise ParameterError(f"The field '{param}' is required.", param=param)
    return value


def for_each(given: Any, kind: type[Any], param: str, count: int) -> list[Any]:
    """A value for each answer; None for each without one. Raises ParameterError."""
    if given is None:
        return [None] * count
    if not isinstance(given, list) or not all(isinstance(each, kind | None) for each in given):
        raise ParameterError(f"{param} must be a list with one for each of generate_responses.", param=param)
    if len(given) != count:
        raise ParameterError(f"{param} has {len(given)} entries, and generate_responses has {count}.", param=param)
    return given
