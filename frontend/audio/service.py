"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound in, its text out, whole or as a stream."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, NamedTuple

from msgspec import UNSET, Struct

from quire.core.errors import NotFoundError, ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.audio.answers import DurationUsage, Segment, Transcription, VerboseTranscription
from quire.frontend.audio.clip_writer import ClipRequest, ClipWriter
from quire.frontend.audio.events import SpeechEvents
from quire.frontend.audio.schema import SpeechRequest
from quire.frontend.audio.segments import ClipText, segments_of
from quire.frontend.audio.subtitles import srt, vtt
from quire.frontend.chat.client_headers import RANK_HEADER, ClientHeaders
from quire.frontend.chat.renaming import renamed
from quire.frontend.checkpoint.speech_tokens import SpeechTokens
from quire.frontend.http.event_stream import ACCEPTED
from quire.frontend.media.hearing import HeardSound, Hearing
from quire.frontend.media.room import Room
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.deadline import current_deadline
from quire.frontend.requests.merging import OutputStream

CLIPS_AT_ONCE = 8
"""Clips of one sound that the engine has at once, so that a long sound leaves room for other requests."""

_WITHOUT_SPACES = {"ja", "zh", "yue", "th", "lo", "my"}
"""Languages whose words have no spaces between them, and so neither their clips."""


class _Opened(NamedTuple):
    """A request that has been read: the sound, and what is asked for each of its clips."""

    id: str
    sound: HeardSound
    clip: ClipRequest
    language: str | None

    @property
    def separator(self) -> str:
        return "" if self.language in _WITHOUT_SPACES else " "


class SpeechToText:
    """Answers requests for transcriptions and translations. It needs no HTTP, so the batch runner uses it too."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._model = engine.model
        self._room = Room()

    async def complete(
        self, request: SpeechRequest, data: bytes, headers: ClientHeaders = ClientHeaders()
    ) -> Struct | str:
        """The whole answer, a Struct for JSON or a text; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        hearing, tokens = self._check(request)
        async with self._room.place() as place:
            opened = await self._open(request, data, headers, hearing, tokens)
            place.num_bytes = opened.sound.num_bytes
            clips = await self._write_all(request, opened, tokens)
        return self._answer(request, opened, tokens, clips)

    async def stream(
        self, request: SpeechRequest, data: bytes, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator aborts it in the engine. Errors as for `complete`."""
        hearing, tokens = self._check(request)
        async with self._room.place() as place:
            opened = await self._open(request, data, headers, hearing, tokens)
            place.num_bytes = opened.sound.num_bytes
            async with aclosing(self._frames(request, opened, tokens)) as frames:
                async for frame in frames:
                    yield frame

    async def _frames(
        self, request: SpeechRequest, opened: _Opened, tokens: SpeechTokens
    ) -> AsyncGenerator[bytes, None]:
        """The events of all clips. Some of the next are with the engine while one is sent."""
        events = SpeechEvents(request, opened.id, self._model.chosen_name, int(time.time()), opened.separator)
        writer, waiting = ClipWriter(self._engine, tokens), list(enumerate(opened.sound.clips))
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

    def _check(self, request: SpeechRequest) -> tuple[Hearing, SpeechTokens]:
        self._model.choose(request.model)
        request.check()
        hearing, rules = self._engine.hearing, self._model.decoder
        if hearing is None or rules is None or rules.speech is None:
            raise NotFoundError(
                f"{self._model.name} hears nothing; sounds are for a server of a model such as Whisper.", param="model"
            )
        tokens = rules.speech
        _check_languages(request, tokens)
        if request.wants_timestamps and tokens.no_timestamps is None:
            raise ParameterError(
                f"response_format {request.response_format} needs times, and {self._model.name} has no tokens for "
                "them; ask for json or text.",
                param="response_format",
            )
        return hearing, tokens

    async def _open(
        self,
        request: SpeechRequest,
        data: bytes,
        headers: ClientHeaders,
        hearing: Hearing,
        tokens: SpeechTokens,
    ) -> _Opened:
        before = await self._text_before(request)
        params = beams = None
        if not request.use_beam_search:
            params = SamplingParams(**self._sampling_fields(request))
        reply_id = f"{request.task}-{headers.choose_id(None)}"
        await self._engine.start()
        sound = await _in_time(hearing.read_file(data, "file", divides=True))
        names = functools.partial(renamed, max_tokens="max_completion_tokens", data_parallel_rank=RANK_HEADER)
        asked = ClipRequest([], params, beams, reply_id, request.priority, headers.data_parallel_rank, names)
        language = request.language and request.language.lower()
        if language is None and tokens.languages:
            codes = {token_id: code for code, token_id in tokens.languages.items()}
            first = await ClipWriter(self._engine, tokens).listen(sound.clips[0], asked, 0, list(codes))
            language = codes[first.token_id]
        prompt = tokens.prompt(language=language, task=request.task, timestamps=request.wants_timestamps, before=before)
        if request.use_beam_search:
            beams = self._beams(request, len(prompt))
        return _Opened(reply_id, sound, asked._replace(prompt=prompt, beams=beams), language)

    async def _text_before(self, request: SpeechRequest) -> list[int]:
        """Token ids of the request's own `prompt`: its last ones, in half of the decoder's context."""
        text = request.prompt.strip()
        if not text:
            return []
        token_ids = await self._engine.async_tokenizer.tokenize(f" {text}", add_special_tokens=False, must_fit=False)
        return token_ids[-(self._engine.limit.max_model_len // 2 - 1) :]

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

    async def _write_all(self, request: SpeechRequest, opened: _Opened, tokens: SpeechTokens) -> list[ClipText]:
        """The texts of all clips, a few at a time."""
        writer, room = ClipWriter(self._engine, tokens), asyncio.Semaphore(CLIPS_AT_ONCE)
        scores_silence = request.response_format == "verbose_json"

        async def write(number: int) -> ClipText:
            async with room:
                return await writer.write(
                    opened.sound.clips[number],
                    opened.clip,
                    number,
                    falls_back=request.falls_back,
                    scores_silence=scores_silence,
                )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(write(number)) for number in range(len(opened.sound.clips))]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(
        self, request: SpeechRequest, opened: _Opened, tokens: SpeechTokens, clips: list[ClipText]
    ) -> Struct | str:
        usage = DurationUsage.of(opened.sound.num_seconds) if request.task == "transcribe" else UNSET
        if not request.wants_timestamps:
            text = opened.separator.join(clip.text for clip in clips if clip.text)
            return text + "\n" if request.response_format == "text" else Transcription(text, usage)
        decode = self._engine.async_tokenizer.tokenizer.decode
        segments: list[Segment] = []
        texts = []
        for clip in clips:
            own = segments_of(clip, tokens, decode, len(segments))
            segments += own
            texts.append("".join(each.text for each in own).strip())
        match request.response_format:
            case "srt":
                return srt(segments)
            case "vtt":
                return vtt(segments)
        return VerboseTranscription(
            request.task,
            opened.language,
            opened.sound.num_seconds,
            opened.separator.join(text for text in texts if text),
            segments,
            usage=usage,
        )


async def _in_time(reading: Awaitable[HeardSound]) -> HeardSound:
    """The result, within the time that the caller gave the request. Raises DeadlineError."""
    deadline = current_deadline()
    if deadline is None:
        return await reading
    try:
        return await asyncio.wait_for(reading, max(0.0, deadline.at - time.monotonic()))
    except TimeoutError:
        raise deadline.error() from None


def _check_languages(request: SpeechRequest, tokens: SpeechTokens) -> None:
    """Refuses languages that the model does not know, and outputs in others than it writes."""
    language, wanted = (each and each.lower() for each in (request.language, request.to_language))
    known = tokens.languages
    if language is not None and known and language not in known:
        raise ParameterError(
            f"language {request.language!r:.40} is not one of the model's: {', '.join(sorted(known))}.",
            param="language",
        )
    if language not in (None, "en") and not known:
        raise ParameterError("language must be en: this model knows English alone.", param="language")
    if request.task == "translate" and "translate" not in tokens.tasks:
        raise ParameterError(
            "This model does not translate; ask /v1/audio/transcriptions for a text in the sound's language.",
            param="model",
        )
    written = "en" if request.task == "translate" else language
    if wanted is not None and wanted != written:
        what = "translations are in English (en)" if request.task == "translate" else "it writes the sound's language"
        raise ParameterError(f"to_language {request.to_language!r:.40} is refused: {what}.", param="to_language")
