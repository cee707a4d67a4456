"""Writes the text of a clip: one request of the engine, or several at rising temperatures."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from quire.core.wire.pooling import AlignmentHead, Pooling
from quire.core.wire.request_ids import engine_id
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.audio.schema import FALLBACK_TEMPERATURES
from quire.frontend.audio.segments import ClipText, compression_ratio
from quire.frontend.audio.words import token_times
from quire.frontend.checkpoint.speech_tokens import SpeechTokens
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.merging import OutputStream
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.submission import PoolingSubmission, Submission

_RATE, _SAMPLES_A_FRAME, _FRAMES_A_ROW = 16_000, 160, 2
"""Of sounds, of spectrograms, and of what the encoder makes of these."""

_MOST_REPETITION = 2.4
_LEAST_LOGPROB = -1.0
_LEAST_NO_SPEECH = 0.6
"""Thresholds of Whisper's own decoding (arXiv:2212.04356, 4.5)."""


class ClipRequest(NamedTuple):
    """What is asked of the engine for each clip of a sound.

    Attributes:
        params: of one output; None with `beams`.
        beams: of a beam search; None without.
        names: renames fields in errors.
    """

    params: SamplingParams | None
    beams: BeamSearchParams | None
    reply_id: str
    priority: int
    data_parallel_rank: int | None
    names: Callable[[], AbstractContextManager[None]]


class SpokenClip(NamedTuple):
    """A part of a sound, and the prompt for its text."""

    start_seconds: float
    num_seconds: float
    prompt: Prompt


class FirstToken(NamedTuple):
    """The first token after the start, and how likely the clip holds no speech; None: the model does not say."""

    token_id: int
    no_speech_prob: float | None


class ClipWriter:
    """Opens the requests of clips, and reads their outputs.

    Args:
        tokens: the model's own of speech; None: it has none.
    """

    def __init__(self, engine: AsyncLLM, tokens: SpeechTokens | None) -> None:
        self._engine = engine
        self._tokens = tokens

    async def open(
        self, clip: SpokenClip, asked: ClipRequest, number: int, params: SamplingParams | None = None
    ) -> OutputStream:
        """Opens the request of a clip; `params` take the place of those of `asked`. The caller closes the stream."""
        request_id = engine_id(asked.reply_id, number)
        rank, priority = asked.data_parallel_rank, asked.priority
        with asked.names():
            if asked.beams is not None:
                beams = Submission(clip.prompt, asked.beams, request_id, priority=priority, data_parallel_rank=rank)
                return await self._engine.open_beams(beams, returns_logprobs=False)
            return await self._engine.open_stream(
                Submission(
                    clip.prompt,
                    params or asked.params,
                    request_id,
                    priority=priority,
                    fit_context=True,
                    data_parallel_rank=rank,
                )
            )

    async def write(
        self, clip: SpokenClip, asked: ClipRequest, number: int, *, falls_back: bool, scores_silence: bool
    ) -> ClipText:
        """The text of a clip.

        Args:
            falls_back: a text that looks wrong is written again at higher temperatures, and a clip that seems silent
                has none.
            scores_silence: the text comes with `no_speech_prob`.
        """
        silence: float | None = None
        if scores_silence:
            silence = (await self.listen(clip, asked, number, [])).no_speech_prob
        found = await self._write_once(clip, asked, number, None)
        for temperature in FALLBACK_TEMPERATURES if falls_back else ():
            is_unlikely = _mean(found.logprobs) < _LEAST_LOGPROB
            if not is_unlikely and compression_ratio(found.text) <= _MOST_REPETITION:
                break
            if silence is None:
                silence = (await self.listen(clip, asked, number, [])).no_speech_prob
            if is_unlikely and silence is not None and silence > _LEAST_NO_SPEECH:
                found = found._replace(token_ids=[], logprobs=[], text="")
                break
            assert asked.params is not None
            found = await self._write_once(clip, asked, number, asked.params.replace(temperature=temperature))
        return found._replace(no_speech_prob=silence)

    async def listen(self, clip: SpokenClip, asked: ClipRequest, number: int, among: list[int]) -> FirstToken:
        """The model's first impression of a clip; the engine keeps what it has heard for the clip's own request.

        Args:
            among: the tokens that may come first; empty: all.
        """
        assert self._tokens is not None, "only a model with tokens of speech is asked"
        silence = self._tokens.no_speech
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=among or None,
            logprob_token_ids=None if silence is None else [silence],
            detokenize=False,
        )
        start = clip._replace(prompt=clip.prompt._replace(token_ids=[self._tokens.start]))
        asked = asked._replace(beams=None)
        best = (await _last_output(await self.open(start, asked, number, params))).outputs[0]
        no_speech = None
        if silence is not None and best.logprobs:
            no_speech = math.exp(best.logprobs[0][silence].logprob)
        return FirstToken(best.token_ids[0], no_speech)

    async def align(self, clip: SpokenClip, asked: ClipRequest, number: int, text: ClipText) -> ClipText:
        """The text with the times of its tokens. The decoder reads it once more, after the same prompt."""
        assert self._tokens is not None, "only a model with tokens of speech is asked"
        # As in Transformers, an output's last token is not read, and ends with the one before.
        read = text.token_ids if text.is_ended else text.token_ids[:-1]
        if not read:
            return text._replace(times=[0.0] * len(text.token_ids))
        num_frames = -(-round(clip.num_seconds * _RATE) // _SAMPLES_A_FRAME)
        pooling = Pooling(
            "aligned",
            num_lead_tokens=len(clip.prompt.token_ids),
            alignment_heads=[AlignmentHead(*head) for head in self._tokens.alignment_heads],
            num_rows=max(1, num_frames // _FRAMES_A_ROW),
        )
        prompt = clip.prompt._replace(token_ids=[*clip.prompt.token_ids, *read])
        submission: PoolingSubmission = Submission(
            prompt,
            None,
            engine_id(asked.reply_id, number),
            priority=asked.priority,
            data_parallel_rank=asked.data_parallel_rank,
        )
        with asked.names():
            stream = await self._engine.open_alignment(submission, pooling)
        try:
            values = (await stream.output()).outputs.values
        finally:
            stream.close()
        matrix = np.frombuffer(values, "<f4").reshape(len(read), -1)
        times = await asyncio.to_thread(token_times, matrix)
        return text._replace(times=times if text.is_ended else [*times, times[-1]])

    async def _write_once(
        self, clip: SpokenClip, asked: ClipRequest, number: int, params: SamplingParams | None
    ) -> ClipText:
        output = await _last_output(await self.open(clip, asked, number, params))
        best, params = output.outputs[0], params or asked.params
        token_ids, rows = list(best.token_ids), best.logprobs or []
        logprobs = [row[token_id].logprob for row, token_id in zip(rows, token_ids, strict=False)]
        is_ended = False
        while self._tokens is not None and token_ids and token_ids[-1] == self._tokens.end:
            token_ids.pop()
            is_ended = True
        return ClipText(
            clip.start_seconds,
            clip.num_seconds,
            token_ids,
            logprobs,
            best.text.strip(),
            0.0 if params is None else params.temperature,
            is_ended,
        )


async def _last_output(stream: OutputStream) -> RequestOutput:
    """The last output of a stream, which is then closed."""
    last: RequestOutput | None = None
    try:
        outputs: AsyncIterator[RequestOutput] = aiter(stream)
        async for output in outputs:
            last = output
    finally:
        stream.close()
    assert last is not None, "a stream has an output or an error"
    return last


def _mean(logprobs: Sequence[float]) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
