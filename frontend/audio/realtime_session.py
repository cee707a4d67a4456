"""A session of realtime transcription: sounds come in pieces, and their text goes out as it is written."""

import asyncio
import base64
import binascii
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from quire.core import envs
from quire.core.errors import QuireError, UnavailableError
from quire.frontend.audio.answers import TokenUsage
from quire.frontend.audio.events import JoinedText
from quire.frontend.audio.realtime_events import (
    AppendSound,
    ClearSound,
    CommitSound,
    EventError,
    RealtimeError,
    ServerEvent,
    SessionCreated,
    SessionUpdate,
    TranscriptionDelta,
    TranscriptionDone,
    checked_request,
    read_event,
)
from quire.frontend.audio.schema import TranscriptionRequest
from quire.frontend.audio.service import SpeechToText
from quire.frontend.audio.sound_buffer import SoundBuffer, as_wav
from quire.frontend.http.body_budget import BodyCharge
from quire.frontend.http.errors import ErrorReporter
from quire.frontend.http.server_state import ServerState
from quire.frontend.keys.caller import current_caller
from quire.frontend.outputs import RequestOutput

GOING_AWAY, TOO_BIG, TRY_LATER = 1001, 1009, 1013
"""Codes of a websocket's end (RFC 6455, 7.4)."""
MOST_WAITING = 64
"""Clips and ends of utterances that may wait."""


class _Utterance:
    """What was written since the last `transcription.done`.

    Attributes:
        has_sound: a clip of it has been taken.
        language: as the model heard it in the first clip; None: not known yet.
    """

    def __init__(self) -> None:
        self.has_sound = False
        self.language: str | None = None
        self.text = JoinedText()
        self.num_prompt_tokens = self.num_tokens = 0

    def add(self, output: RequestOutput) -> str:
        """What an output brings to show."""
        best = output.outputs[0]
        self.num_tokens += len(best.token_ids)
        if best.finish_reason is not None:
            self.num_prompt_tokens += output.num_prompt_tokens
        return self.text.add(best.text)

    def done(self) -> TranscriptionDone:
        """The event of its end."""
        prompt, output = self.num_prompt_tokens, self.num_tokens
        return TranscriptionDone(self.text.whole, TokenUsage(prompt, output, prompt + output))


class RealtimeSession:
    """Reads events and writes events. A clip is transcribed as soon as its end is known: at the commit, or where a
    longer sound would be divided.

    Args:
        state: of the server; what was committed is finished while it drains.
        send: sends an event to the client. Raises OSError if it is gone.
        check: raises for a client that may not connect any more.
        charge: what the samples take of the bytes for all bodies; None: there is no limit.
    """

    def __init__(
        self,
        speech: SpeechToText,
        state: ServerState,
        errors: ErrorReporter,
        send: Callable[[ServerEvent], Awaitable[None]],
        check: Callable[[], Awaitable[None]],
        charge: BodyCharge | None,
    ) -> None:
        self._speech = speech
        self._state = state
        self._errors = errors
        self._send = send
        self._check = check
        self._charge = charge
        self._max_bytes = int(envs.read_float("MAX_AUDIO_CLIP_FILESIZE_MB") * 2**20)
        self._buffer = SoundBuffer(speech.clip_seconds())
        self._request: TranscriptionRequest | None = None
        self._written = _Utterance()  # by the writer
        self._has_sound = False  # of the utterance that is read
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()  # clips; None ends an utterance
        self._num_waiting_bytes = 0
        self._gone = asyncio.Event()

    async def run(self, messages: AsyncIterator[str]) -> int | None:
        """Serves until `messages` end, which is when the client is gone; or returns the code to close with."""
        await self._send(SessionCreated(f"sess-{uuid.uuid4().hex}", int(time.time())))
        reader = asyncio.create_task(self._read(messages))
        writer = asyncio.create_task(self._write())
        draining = asyncio.create_task(self._drained())
        try:
            done, _ = await asyncio.wait({reader, writer, draining}, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        except OSError:
            return None
        finally:
            self._gone.set()
            tasks = (reader, writer, draining)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drained(self) -> int:
        """Returns once the server stops, and what was committed before is written."""
        await self._state.until_draining()
        await self._waiting.join()
        return GOING_AWAY

    # --------------------------------------------------------------------------------------------------------- reading

    async def _read(self, messages: AsyncIterator[str]) -> int | None:
        async for message in messages:
            try:
                self._state.check_ready()
                if (code := await self._handle(message)) is not None:
                    return code
                if self._waiting.qsize() > MOST_WAITING:
                    text = f"More than {MOST_WAITING} clips and commits wait; send slower."
                    await self._send(RealtimeError(text, "too_much_audio"))
                    return TOO_BIG
            except EventError as error:
                await self._send(RealtimeError(str(error), error.code))
            except QuireError as error:
                await self._refuse(error, "processing_error")
        return None

    async def _handle(self, message: str) -> int | None:
        """Does what an event asks; returns the code of an end."""
        match read_event(message):
            case SessionUpdate() as event:
                request = checked_request(event)
                self._speech.check(request)
                self._request = request
                self._hand_on_clips()
            case AppendSound(audio=audio):
                return await self._append(audio)
            case ClearSound():
                self._forget(self._buffer.clear())
            case CommitSound(final=final):
                self._commit(is_final=final)
        return None

    async def _append(self, audio: str) -> int | None:
        if self._request is None and self._buffer.is_full:
            raise _no_session()
        try:
            data = base64.b64decode(audio, validate=True)
            self._buffer.add(data)
        except (binascii.Error, ValueError) as error:
            raise EventError(f"audio must be base64 of 16-bit samples: {error}.", "invalid_audio") from None
        if self._num_waiting_bytes + self._buffer.num_bytes > self._max_bytes:
            text = f"More than {self._max_bytes} bytes of samples wait (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB); send slower."
            await self._send(RealtimeError(text, "too_much_audio"))
            return TOO_BIG
        if self._charge is not None:
            try:
                self._charge.add(len(data))
            except QuireError as error:
                await self._refuse(error, "overloaded")
                return TRY_LATER
        self._hand_on_clips()
        return None

    def _hand_on_clips(self) -> None:
        """Gives whole clips to the writer, if the client has said what they are."""
        while self._request is not None and (clip := self._buffer.take_clip()) is not None:
            self._hand_on(clip)

    def _hand_on(self, clip: bytes) -> None:
        self._has_sound = True
        self._num_waiting_bytes += len(clip)
        self._waiting.put_nowait(clip)

    def _commit(self, *, is_final: bool) -> None:
        if self._request is None:
            raise _no_session()
        for clip in self._buffer.take_rest():
            self._hand_on(clip)
        if self._has_sound or is_final:
            self._waiting.put_nowait(None)
            self._has_sound = False

    def _forget(self, num_bytes: int) -> None:
        if self._charge is not None:
            self._charge.remove(num_bytes)

    # --------------------------------------------------------------------------------------------------------- writing

    async def _write(self) -> int | None:
        """Transcribes clip after clip. Returns a code if the server stops."""
        while True:
            clip = await self._waiting.get()
            try:
                if clip is None:
                    done, self._written = self._written.done(), _Utterance()
                    await self._send(done)
                else:
                    await self._state.run(self._transcribe(clip), self._until_gone)
            except UnavailableError as error:
                await self._refuse(error, "processing_error")
                if self._state.is_stopped:
                    return GOING_AWAY
            except OSError:
                return None  # the client is gone
            except Exception as error:  # of any clip; those after it may go well
                if self._gone.is_set():
                    return None
                await self._refuse(error, "processing_error")
            finally:
                if clip is not None:
                    self._num_waiting_bytes -= len(clip)
                    self._forget(len(clip))
                self._waiting.task_done()

    async def _transcribe(self, clip: bytes) -> None:
        assert self._request is not None, "clips are handed on after the first session.update"
        await self._check()  # keys may have changed since
        if (caller := current_caller()) is not None:
            await caller.admit_request()
        written, request = self._written, self._request
        if request.language is None and written.language is not None:
            request = msgspec.structs.replace(request, language=written.language)
        async with self._speech.open_sound(request, as_wav(clip)) as sound:
            written.language = sound.language
            async for outputs in sound.clips:
                written.text.begin_clip(sound.separator)
                async for output in outputs:
                    if delta := written.add(output):
                        await self._send(TranscriptionDelta(delta))

    async def _until_gone(self) -> Any:
        """Receives, as ASGI does, that the client is gone."""
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _refuse(self, error: Exception, code: str) -> None:
        problem = self._errors.report(error, "a realtime transcription")
        await self._send(RealtimeError(problem.message, code))


def _no_session() -> EventError:
    return EventError("Send session.update with a model first.", "model_not_validated")
