"""Beam search: the likeliest outputs instead of sampled ones.

Each beam's next token is a separate request, for one token and the likeliest tokens at its position. Beams find the
pages of their common prefix in the prefix cache, so a step computes little more than one token a beam.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct

from quire.core.config.resolved import ModelSpec
from quire.core.errors import EngineError, ParameterError
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.checkpoint.encoder_decoders import DecoderRules
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.merging import cancel
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.time_slices import in_time_slices
from quire.frontend.text.tokenizer import Tokenizer

BEAMS_PER_SLICE = 16
"""Beams whose requests are opened in one turn of the event loop, so that other streams do not wait."""


class Beam(Struct, kw_only=True):
    """One output so far. `cum_logprob` includes the token that ended the beam, even where `token_ids` leaves it out."""

    token_ids: list[int]
    cum_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = []
    finish_reason: str | None = None
    stop_reason: int | None = None


class _Step(NamedTuple):
    """A candidate for a beam's next token; `row` has the log-probabilities of all candidates of that beam."""

    cum_logprob: float
    beam: Beam
    token_id: int
    row: dict[int, Logprob]


_cum_logprob = itemgetter(0)


class BeamSearchSequence(Struct, kw_only=True):
    """One of the outputs of `LLM.beam_search`; `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | None


class BeamSearchOutput(Struct):
    """The outputs for one prompt, best first."""

    sequences: list[BeamSearchSequence]


OpenRequest = Callable[[Prompt, SamplingParams, str], Awaitable[RequestStream]]
"""Opens a request of the given id in the engine."""


def check_beams(prompt: Prompt, params: BeamSearchParams, max_model_len: int, num_before: int = 0) -> None:
    """Refuses a prompt that a search cannot start from, or that leaves too little room for the outputs.

    Args:
        num_before: rows of a soft prompt.

    Raises:
        ParameterError: the prompt is wrong, or too long for max_tokens.
    """
    if prompt.embeds is not None:
        raise ParameterError(
            "prompt_embeds do not go with beam search; leave use_beam_search out.", param="prompt_embeds"
        )
    num_tokens = num_before + len(prompt.token_ids)
    if params.max_tokens > max_model_len - num_tokens:
        raise ParameterError(
            f"The prompt has {num_tokens} tokens and max_tokens asks for {params.max_tokens} more, which is over the "
            f"limit of {max_model_len} (max_model_len).",
            param="max_tokens",
        )


class BeamSearch:
    """The search for one prompt, an iterator of one output; `close` ends it early.

    Args:
        open_request: runs the beams' requests.
        tokenizer: None for outputs without text.
        spec: the model's facts, such as its EOS tokens.
        prompt: read and checked.
        request_id: prefix of the ids of the beams' requests.
        lora_request: the adapter that a program gave, for the output to show.
        returns_logprobs: the output includes log-probabilities.
        rules: what the checkpoint demands of outputs; None: nothing.
    """

    def __init__(
        self,
        open_request: OpenRequest,
        tokenizer: Tokenizer | None,
        spec: ModelSpec,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        returns_logprobs: bool = True,
        rules: DecoderRules | None = None,
    ) -> None:
        self._open_request = open_request
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._params = params
        self._request_id = request_id
        self._lora_request = lora_request
        self._returns_logprobs = returns_logprobs
        self._eos_token_ids = frozenset(() if params.ignore_eos else spec.eos_token_ids)
        self._end_ids = self._eos_token_ids.union(params.stop_token_ids)
        self._rules = rules or DecoderRules(decoder_start_token_id=0)
        width = params.beam_width
        num_ruled_out = len(self._rules.bad_words_ids) + len(self._rules.begin_suppress_tokens)
        num_likeliest = min(max(2 * width, width + len(self._end_ids)) + num_ruled_out, spec.vocab_size)
        self._sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=num_likeliest,  # so that `width` candidates remain if the others end the output
            ignore_eos=True,
            detokenize=tokenizer is not None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._task: asyncio.Task[RequestOutput] | None = None
        self._num_cached_tokens: int | None = None

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """The one output.

        Raises:
            QuireError: the engine refused a beam, or failed.
        """
        self._task = asyncio.create_task(self._run())
        try:
            yield await self._task
        finally:
            self.close()

    def close(self) -> None:
        """Ends the search. Harmless at the end."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a failed task holds its error, whose traceback leads here

    async def _run(self) -> RequestOutput:
        return self.output(await self.sequences())

    def output(self, beams: list[Beam]) -> RequestOutput:
        """The beams in the form of any other request's output."""
        encoder = self._prompt.encoder
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[
                CompletionOutput(
                    index=index,
                    text=self._text(beam.token_ids),
                    token_ids=beam.token_ids,
                    cumulative_logprob=beam.cum_logprob,
                    logprobs=beam.logprobs if self._returns_logprobs else None,
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                )
                for index, beam in enumerate(beams)
            ],
            finished=True,
            num_cached_tokens=self._num_cached_tokens,
            lora_request=self._lora_request,
            encoder_prompt=None if encoder is None else encoder.text,
            encoder_prompt_token_ids=None if encoder is None else encoder.token_ids,
        )

    def with_prompt(self, beam: Beam) -> BeamSearchSequence:
        """The beam with the prompt in front."""
        tokens = self._prompt.token_ids + beam.token_ids
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=beam.logprobs,
            cum_logprob=beam.cum_logprob,
            text=self._text(tokens),
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return ""
        if self._params.skip_special_tokens:
            skipped = tokenizer.special_token_ids.difference(self._params.shown_special_token_ids)
            token_ids = [token_id for token_id in token_ids if token_id not in skipped]
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    async def sequences(self) -> list[Beam]:
        """The best outputs, best first; at most `beam_width` of them."""
        width = self._params.beam_width
        running, complete = [Beam(token_ids=[])], list[Beam]()
        for num_tokens in range(1, self._params.max_tokens + 1):
            rows = await self._expand(running, num_tokens)
            longer, ended = list[_Step](), list[_Step]()
            async for beam, row in in_time_slices(zip(running, rows, strict=True)):
                for token_id, entry in self._ruled(row, beam.token_ids).items():
                    step = _Step(beam.cum_logprob + entry.logprob, beam, token_id, row)
                    (ended if token_id in self._end_ids else longer).append(step)
            running = [self._taken(step) for step in nlargest(width, longer, key=_cum_logprob)]
            complete += [self._taken(step) for step in nlargest(width, ended, key=self._score_of_end)]
            complete = sorted(complete, key=self._score, reverse=True)[:width]
            if not running or self._is_decided(running, complete, num_tokens):
                break
        else:
            for beam in running:
                beam.finish_reason = "length"
            complete = sorted(complete + running, key=self._score, reverse=True)[:width]
        return complete

    def _ruled(self, row: dict[int, Logprob], token_ids: list[int]) -> dict[int, Logprob]:
        """The candidates of `row` that the checkpoint's rules leave after a beam's tokens."""
        rules, place = self._rules, len(token_ids)
        if rules.forced_eos_token_id and not self._params.ignore_eos and place == self._params.max_tokens - 1:
            return {token_id: Logprob(0.0, rank=1) for token_id in rules.forced_eos_token_id}
        out = {ids[-1] for ids in rules.bad_words_ids if token_ids[place + 1 - len(ids) :] == ids[:-1]}
        if not place:
            out.update(rules.begin_suppress_tokens)
        if len(self._prompt.token_ids) + place < rules.min_length:
            out |= self._eos_token_ids
        return {token_id: entry for token_id, entry in row.items() if token_id not in out} if out else row

    async def _expand(self, beams: list[Beam], step: int) -> list[dict[int, Logprob]]:
        """Log-probabilities of the likeliest next tokens, best first, for each beam."""
        tasks: list[asyncio.Task[dict[int, Logprob]]] = []
        try:
            async for index, beam in in_time_slices(enumerate(beams), most=BEAMS_PER_SLICE):
                tasks.append(asyncio.create_task(self._likeliest(beam, f"{step}-{index}")))
            return await asyncio.gather(*tasks)
        finally:
            await cancel(tasks)  # one failed, or the search is closed

    async def _likeliest(self, beam: Beam, name: str) -> dict[int, Logprob]:
        prompt = self._prompt._replace(text=None, token_ids=self._prompt.token_ids + beam.token_ids)
        stream = await self._open_request(prompt, self._sampling, f"{self._request_id}-{name}")
        try:
            async for output in stream:
                if self._num_cached_tokens is None:
                    self._num_cached_tokens = output.num_cached_tokens
                [completion] = output.outputs
                if completion.logprobs:
                    return completion.logprobs[0]
        finally:
            stream.close()
        raise EngineError("A beam was ended before it had its next token.")

    def _taken(self, step: "_Step") -> Beam:
        """The beam, longer by one token. Only a chosen step copies its beam."""
        beam, token_id = step.beam, step.token_id
        ends = token_id in self._end_ids
        kept = not ends or self._params.include_stop_str_in_output
        return Beam(
            token_ids=[*beam.token_ids, token_id] if kept else beam.token_ids,
            cum_logprob=step.cum_logprob,
            logprobs=[
                *beam.logprobs,
                {token_id: step.row.get(token_id, Logprob(0.0, rank=1)), **step.row},
            ],  # the chosen first, as in every row
            finish_reason="stop" if ends else None,
            stop_reason=token_id if ends and token_id not in self._eos_token_ids else None,
        )

    def _score_of_end(self, step: "_Step") -> float:
        """`_score` of a step that ends its beam."""
        return self._scored(step.cum_logprob, len(step.beam.token_ids))

    def _score(self, beam: Beam) -> float:
        """vLLM's score: `cum_logprob` over a power of the length of prompt and output, without the ending token."""
        has_end = beam.finish_reason == "stop" and self._params.include_stop_str_in_output
        return self._scored(beam.cum_logprob, len(beam.token_ids) - has_end)

    def _scored(self, cum_logprob: float, num_tokens: int) -> float:
        length = len(self._prompt.token_ids) + num_tokens
        return cum_logprob / max(length, 1) ** self._params.length_penalty

    def _is_decided(self, running: list[Beam], complete: list[Beam], num_tokens: int) -> bool:
        """Returns True if `complete` is final. A sum of log-probabilities only falls, which bounds a running beam's
        score."""
        if len(complete) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        penalty = self._params.length_penalty
        best_length = len(self._prompt.token_ids) + (self._params.max_tokens if penalty > 0 else num_tokens)
        return self._score(complete[-1]) >= running[0].cum_logprob / best_length**penalty
