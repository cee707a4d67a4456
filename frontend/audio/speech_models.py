"""Models that write what they hear, as the service of transcriptions sees them: a sound in, clips with prompts out."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from quire.core.errors import NotFoundError, ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.audio.clip_writer import FirstToken, SpokenClip
from quire.frontend.audio.instructions import Instruction
from quire.frontend.audio.languages import NAMES
from quire.frontend.audio.schema import SpeechRequest
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.conversation import Conversations
from quire.frontend.checkpoint.speech_tokens import SpeechTokens
from quire.frontend.media.hearing import Hearing
from quire.frontend.media.sources import Content, MediaPart
from quire.frontend.requests.media_prompts import MediaPrompts
from quire.frontend.requests.prompt import EncoderPrompt, Prompt

_CLIP_SECONDS = 30.0
"""Longest clip that waits for its end, for models that hear more."""

Listen = Callable[[SpokenClip, list[int]], Awaitable[FirstToken]]
"""The model's first token for a clip, out of some."""


class SpokenSound(NamedTuple):
    """A sound in clips that follow one another.

    Attributes:
        num_bytes: the memory of what the model reads of it.
        language: of the text; None: unknown.
    """

    num_seconds: float
    num_bytes: int
    clips: list[SpokenClip]
    language: str | None


class SpeechModel(Protocol):
    """A model that writes what it hears.

    Attributes:
        tokens: its special tokens of speech; None: it has none, and its texts have no times.
        clip_seconds: the longest clip of a sound that comes while it is spoken.
    """

    @property
    def tokens(self) -> SpeechTokens | None: ...

    @property
    def clip_seconds(self) -> float: ...

    def check(self, request: SpeechRequest) -> None:
        """Raises ParameterError for what the model cannot do."""
        ...

    async def read(self, request: SpeechRequest, data: bytes, listen: Listen) -> SpokenSound:
        """The sound in `data`, a file.

        Raises:
            ParameterError: it cannot be read.
            UnavailableError: the host is too busy.
        """
        ...


class ListeningDecoder:
    """A decoder that attends to a sound's encoder, such as Whisper's. Implements `SpeechModel`."""

    def __init__(self, engine: AsyncLLM, hearing: Hearing, tokens: SpeechTokens) -> None:
        self._engine = engine
        self._hearing = hearing
        self.tokens: SpeechTokens = tokens
        self.clip_seconds = hearing.clip_seconds

    def check(self, request: SpeechRequest) -> None:
        language, wanted = _codes(request)
        known = self.tokens.languages
        if language is not None and known and language not in known:
            raise _unknown_language(request, known)
        if language not in (None, "en") and not known:
            raise ParameterError("language must be en: this model knows English alone.", param="language")
        if request.task == "translate" and "translate" not in self.tokens.tasks:
            raise does_not_translate()
        written = "en" if request.task == "translate" else language
        if wanted is not None and wanted != written:
            what = (
                "translations are in English (en)" if request.task == "translate" else "it writes the sound's language"
            )
            raise ParameterError(f"to_language {request.to_language!r:.40} is refused: {what}.", param="to_language")

    async def read(self, request: SpeechRequest, data: bytes, listen: Listen) -> SpokenSound:
        before = await self._text_before(request)
        sound = await self._hearing.read_file(data, "file", divides=True)
        clips = [
            SpokenClip(
                clip.start_seconds,
                clip.num_seconds,
                Prompt(None, [self.tokens.start], encoder=EncoderPrompt(None, [], clip.features)),
            )
            for clip in sound.clips
        ]
        language, _ = _codes(request)
        if language is None and self.tokens.languages:
            codes = {token_id: code for code, token_id in self.tokens.languages.items()}
            language = codes[(await listen(clips[0], list(codes))).token_id]
        token_ids = self.tokens.prompt(
            language=language, task=request.task, timestamps=request.wants_timestamps, before=before
        )
        asked = [clip._replace(prompt=clip.prompt._replace(token_ids=token_ids)) for clip in clips]
        return SpokenSound(sound.num_seconds, sound.num_bytes, asked, language)

    async def _text_before(self, request: SpeechRequest) -> list[int]:
        """Token ids of the request's own `prompt`: its last ones, in half of the decoder's context."""
        text = request.prompt.strip()
        if not text:
            return []
        token_ids = await self._engine.async_tokenizer.tokenize(f" {text}", add_special_tokens=False, must_fit=False)
        return token_ids[-(self._engine.limit.max_model_len // 2 - 1) :]


class InstructedModel:
    """A model that takes sounds in prompts, and is asked what it hears. Implements `SpeechModel`."""

    tokens = None

    def __init__(
        self, engine: AsyncLLM, media: MediaPrompts, conversations: Conversations, instruction: Instruction
    ) -> None:
        self._engine = engine
        self._media = media
        self._conversations = conversations
        self._instruction = instruction
        self.clip_seconds = instruction.clip_seconds or _CLIP_SECONDS

    def check(self, request: SpeechRequest) -> None:
        for name in ("language", "to_language"):
            code = getattr(request, name)
            if code is not None and code.lower() not in NAMES:
                raise _unknown_language(request, NAMES, name)
        language, wanted = _codes(request)
        if request.task == "translate" and not self._instruction.translates:
            raise does_not_translate()
        if request.task == "transcribe" and wanted is not None and wanted != language:
            raise ParameterError(
                f"to_language {request.to_language!r:.40} is refused: it writes the sound's language.",
                param="to_language",
            )
        if request.prompt.strip() and not self._instruction.takes_prompt:
            raise ParameterError("prompt is refused: the model takes none beside a sound.", param="prompt")

    async def read(self, request: SpeechRequest, data: bytes, listen: Listen) -> SpokenSound:
        if "audio" not in self._media.reader.kinds:
            raise hears_nothing(self._engine.model.name)
        sound = await self._media.reader.divide(data, "file", self._instruction.clip_seconds)
        clips = []
        for part in sound.parts:
            prompt = await self._prompt(request, Content(part.data, rate=0))
            part.data = b""  # hours of samples beside what the model reads of them
            clips.append(SpokenClip(part.start_seconds, part.num_seconds, prompt))
        language, wanted = _codes(request)
        written = language if request.task == "transcribe" else wanted or "en"
        num_bytes = sum(item.num_bytes for clip in clips for item in clip.prompt.media)
        return SpokenSound(sound.num_seconds, num_bytes, clips, written)

    async def _prompt(self, request: SpeechRequest, content: Content) -> Prompt:
        text = self._instruction.write(request)
        if self._instruction.is_whole:
            part = MediaPart("audio", content, "file")
            facts = await self._media.reader.facts("audio", "file")
            whole = text.replace("{sound}", facts.placeholder)
            return await self._media.read(whole, [part], add_special_tokens=False, param="file")
        if request.prompt.strip():
            text = f"{text} {request.prompt.strip()}"
        parts = [{"type": "audio_url", "audio_url": content}, {"type": "text", "text": text}]
        chat = ChatInput(names={"messages": "file"}, messages=[{"role": "user", "content": parts}])
        return await self._conversations.render(chat)


def hears_nothing(name: str) -> NotFoundError:
    """The error for a model without ears."""
    return NotFoundError(f"{name} hears nothing; sounds are for a server of a model such as Whisper.", param="model")


def does_not_translate() -> ParameterError:
    """The error for a model that writes the sound's language alone."""
    return ParameterError(
        "This model does not translate; ask /v1/audio/transcriptions for a text in the sound's language.",
        param="model",
    )


def _codes(request: SpeechRequest) -> tuple[str | None, str | None]:
    """(`language`, `to_language`) in lower case."""
    return request.language and request.language.lower(), request.to_language and request.to_language.lower()


def _unknown_language(request: SpeechRequest, known: object, name: str = "language") -> ParameterError:
    codes = ", ".join(sorted(known))  # type: ignore[call-overload]
    return ParameterError(f"{name} {getattr(request, name)!r:.40} is not one of the model's: {codes}.", param=name)
