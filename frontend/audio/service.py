"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound in, its text out, whole or as a stream."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET, Struct

from quire.core import envs
from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.audio.answers import DurationUsage, Segment, Transcription, VerboseTranscription, Word
from quire.frontend.audio.clip_writer import ClipRequest, ClipWriter
from quire.frontend.audio.events import SpeechEvents
from quire.frontend.audio.instructions import instruction_of
from quire.frontend.audio.schema import SpeechRequest
from quire.frontend.audio.segments import ClipText, segments_of
from quire.frontend.audio.speech_models import (
    InstructedModel,
    ListeningDecoder,
    SpeechModel,
    SpokenSound,
    hears_nothing,
)
from quire.frontend.audio.subtitles import srt, vtt
from quire.frontend.audio.words import words_of
from quire.frontend.chat.client_headers import RANK_HEADER, ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.checkpoint.model_spec import read_json_if_present
from quire.frontend.checkpoint.speech_tokens import SpeechTokens
from quire.frontend.http.event_stream import ACCEPTED
from quire.frontend.media.room import Room
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.deadline import current_deadline
from quire.frontend.requests.merging import OutputStream

CLIPS_AT_ONCE = 8
"""Clips of one sound that the engine has at once, so that a long sound leaves room for other requests."""
_FEWEST_BYTES = 750
"""Of a file a second of sound: 6 kbit/s, the least that codecs of speech have."""
_BYTES_A_SECOND = 64_000
"""Of float32 samples at 16 kHz, as most models hear."""

_WITHOUT_SPACES = {"ja", "zh", "yue", "th", "lo", "my"}
"""Languages whose words have no spaces between them, and so neither their clips."""


class _Opened(NamedTuple):
    """A request that has been read: the sound, and what is asked for each of its clips."""

    id: str
    sound: SpokenSound
    clip: ClipRequest
    tokens: SpeechTokens | None

    @property
    def separator(self) -> str:
        return "" if self.sound.language in _WITHOUT_SPACES else " "


class OpenSound(NamedTuple):
    """A sound whose text is being written.

    Attributes:
        clips: the outputs of clip after clip; each is to be read to its end.
        language: of the text; None: unknown.
        separator: goes between the texts of clips.
    """

    clips: AsyncIterator[OutputStream]
    language: str | None
    separator: str


class SpeechToText:
    """Answers requests for transcriptions and translations. It needs no HTTP, so the batch runner uses it too."""

    def __init__(self, engine: AsyncLLM, conversations: Conversations) -> None:
        self._engine = engine
        self._conversations = conversations
        self._model = engine.model
        self._speech = self._speech_model()
        self._room = Room()

    async def complete(
        self, request: SpeechRequest, data: bytes, headers: ClientHeaders = ClientHeaders()
    ) -> Struct | str:
        """The whole answer, a Struct for JSON or a text; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        speech = self._check(request)
        async with self._room.place(_most_bytes(data)) as place:
            opened = await self._open(request, data, headers, speech)
            place.settle(opened.sound.num_bytes)
            clips = await self._write_all(request, opened)
        return self._answer(request, opened, clips)

    async def stream(
        self, request: SpeechRequest, data: bytes, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator aborts it in the engine. Errors as for `complete`."""
        speech = self._check(request)
        async with self._room.place(_most_bytes(data)) as place:
            opened = await self._open(request, data, headers, speech)
            place.settle(opened.sound.num_bytes)
            async with aclosing(self._frames(request, opened)) as frames:
                async for frame in frames:
                    yield frame

    def clip_seconds(self) -> float:
        """The longest clip of a sound that comes while it is spoken. Raises NotFoundError for a model without ears."""
        return self._hearing_model().clip_seconds

    def check(self, request: SpeechRequest) -> None:
        """Raises RequestError for what cannot be served as asked."""
        self._check(request)
        SamplingParams(**self._sampling_fields(request))

    @asynccontextmanager
    async def open_sound(self, request: SpeechRequest, data: bytes) -> AsyncIterator[OpenSound]:
        """The outputs of a file; leaving aborts it in the engine. Errors as for `complete`."""
        speech = self._check(request)
        async with self._room.place(_most_bytes(data)) as place:
            opened = await self._open(request, data, ClientHeaders(), speech)
            place.settle(opened.sound.num_bytes)
            async with aclosing(self._streams(opened)) as clips:
                yield OpenSound(clips, opened.sound.language, opened.separator)

    async def _streams(self, opened: _Opened) -> AsyncGenerator[OutputStream, None]:
        """The outputs of one clip after another."""
        writer = ClipWriter(self._engine, opened.tokens)
        for number, clip in enumerate(opened.sound.clips):
            stream = await writer.open(clip, opened.clip, number)
            try:
                yield stream
            finally:
                stream.close()

    async def _frames(self, request: SpeechRequest, opened: _Opened) -> AsyncGenerator[bytes, None]:
        """The events of all clips. Some of the next are with the engine while one is sent."""
        events = SpeechEvents(request, opened.id, self._model.chosen_name, int(time.time()), opened.separator)
        writer, waiting = ClipWriter(self._engine, opened.tokens), list(enumerate(opened.sound.clips))
        streams: list[OutputStream] = []
        try:
            yield ACCEPTED
            while waiting or streams:
                while waiting and len(streams) < CLIPS_AT_ONCE:
                    number, clip = waiting.pop(0)
                    streams.append(await writer.open(clip, opened.clip, number))
                async for output in streams[0]:
                    if frame := events.add(output):
                        yield frame
                events.end_clip()
                streams.pop(0).close()
            yield events.end(opened.sound.num_seconds)
        finally:
            for stream in streams:
                stream.close()

    # ----------------------------------------------------------------------------------------------------- requests

    def _speech_model(self) -> SpeechModel | None:
        hearing, rules, media = self._engine.hearing, self._model.decoder, self._engine.media
        if hearing is not None and rules is not None and rules.speech is not None:
            return ListeningDecoder(self._engine, hearing, rules.speech)
        if media is None or rules is not None:  # or its encoder reads images
            return None
        config = read_json_if_present(Path(self._model.folder) / "config.json")
        instruction = instruction_of(str(config.get("model_type")))
        return InstructedModel(self._engine, media, self._conversations, instruction)

    def _hearing_model(self) -> SpeechModel:
        if self._speech is None:
            raise hears_nothing(self._model.name)
        return self._speech

    def _check(self, request: SpeechRequest) -> SpeechModel:
        self._model.choose(request.model)
        request.check()
        speech = self._hearing_model()
        speech.check(request)
        if request.wants_timestamps and (speech.tokens is None or speech.tokens.no_timestamps is None):
            raise ParameterError(
                f"response_format {request.response_format} needs times, and {self._model.name} has no tokens for "
                "them; ask for json or text.",
                param="response_format",
            )
        if request.wants_words and (speech.tokens is None or not speech.tokens.alignment_heads):
            raise ParameterError(
                f"timestamp_granularities word needs alignment_heads in {self._model.name}'s generation_config.json, "
                "which has none; ask for segment.",
                param="timestamp_granularities",
            )
        return speech

    async def _open(self, request: SpeechRequest, data: bytes, headers: ClientHeaders, speech: SpeechModel) -> _Opened:
        params = beams = None
        if not request.use_beam_search:
            params = SamplingParams(**self._sampling_fields(request))
        reply_id = f"{request.task}-{headers.choose_id(None)}"
        await self._engine.start()
        names = functools.partial(renamed, max_tokens="max_completion_tokens", data_parallel_rank=RANK_HEADER)
        asked = ClipRequest(params, beams, reply_id, request.priority, headers.data_parallel_rank, names)
        writer = ClipWriter(self._engine, speech.tokens)
        sound = await _in_time(speech.read(request, data, lambda clip, among: writer.listen(clip, asked, 0, among)))
        if request.use_beam_search:
            beams = self._beams(request, max(len(clip.prompt.token_ids) for clip in sound.clips))
        return _Opened(reply_id, sound, asked._replace(beams=beams), speech.tokens)

    def _sampling_fields(self, request: SpeechRequest) -> dict[str, Any]:
        fields = {**self._engine.sampling_input.defaults, **request.sampling_fields()}
        fields["max_tokens"] = self._engine.sampling_input.limit_output(request.max_completion_tokens)
        if request.wants_timestamps or request.falls_back:
            fields["logprobs"] = 0
        return fields

    def _beams(self, request: SpeechRequest, num_prompt_tokens: int) -> BeamSearchParams:
        room = self._engine.limit.max_model_len - num_prompt_tokens
        most = self._engine.sampling_input.limit_output(request.max_completion_tokens)
        with renamed(beam_width="n", max_tokens="max_completion_tokens"):
            return BeamSearchParams(
                beam_width=request.n,
                max_tokens=room if most is None else min(most, room),
                temperature=request.temperature or 0.0,
                length_penalty=request.length_penalty,
                include_stop_str_in_output=request.include_stop_str_in_output,
            )

    async def _write_all(self, request: SpeechRequest, opened: _Opened) -> list[ClipText]:
        """The texts of all clips, a few at a time."""
        writer, room = ClipWriter(self._engine, opened.tokens), asyncio.Semaphore(CLIPS_AT_ONCE)
        scores_silence = request.response_format == "verbose_json"
        falls_back = request.falls_back and opened.tokens is not None

        async def write(number: int) -> ClipText:
            async with room:
                clip = opened.sound.clips[number]
                text = await writer.write(
                    clip, opened.clip, number, falls_back=falls_back, scores_silence=scores_silence
                )
                return await writer.align(clip, opened.clip, number, text) if request.wants_words else text

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(write(number)) for number in range(len(opened.sound.clips))]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(self, request: SpeechRequest, opened: _Opened, clips: list[ClipText]) -> Struct | str:
        usage = DurationUsage.of(opened.sound.num_seconds) if request.task == "transcribe" else UNSET
        if not request.wants_timestamps:
            text = opened.separator.join(clip.text for clip in clips if clip.text)
            return text + "\n" if request.response_format == "text" else Transcription(text, usage)
        assert opened.tokens is not None, "times need tokens of speech"
        decode = self._engine.async_tokenizer.tokenizer.decode
        segments: list[Segment] = []
        texts = []
        words: list[Word] = []
        for clip in clips:
            if request.wants_words:
                words += words_of(clip, opened.tokens, decode, has_spaces=opened.separator != "")
            own = segments_of(clip, opened.tokens, decode, len(segments))
            segments += own
            texts.append("".join(each.text for each in own).strip())
        match request.response_format:
            case "srt":
                return srt(segments)
            case "vtt":
                return vtt(segments)
        return VerboseTranscription(
            request.task,
            opened.sound.language,
            opened.sound.num_seconds,
            opened.separator.join(text for text in texts if text),
            None if request.timestamp_granularities == ["word"] else segments,
            words if request.wants_words else None,
            usage=usage,
        )


def _most_bytes(data: bytes) -> int:
    """The most that the samples of a file may take while it is read."""
    seconds = min(len(data) / _FEWEST_BYTES, envs.read_float("MAX_AUDIO_DECODE_DURATION_S"))
    return int(seconds * _BYTES_A_SECOND)


async def _in_time(reading: Awaitable[SpokenSound]) -> SpokenSound:
    """The result, within the time that the caller gave the request. Raises DeadlineError."""
    deadline = current_deadline()
    if deadline is None:
        return await reading
    try:
        return await asyncio.wait_for(reading, max(0.0, deadline.at - time.monotonic()))
    except TimeoutError:
        raise deadline.error() from None
