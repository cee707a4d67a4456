"""Fields of requests for transcriptions and translations, with the names of OpenAI's API and of vLLM's additions.

They come as a form, whose texts are read as numbers and truth values.
"""

from typing import Any, ClassVar, Literal

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.chat.body_fields import read_sampling, refuse_unsupported

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]
Granularity = Literal["word", "segment"]
SUBTITLES = ("srt", "vtt")
FALLBACK_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that follow 0, as in Whisper's own decoding."""


class SpeechRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that transcriptions and translations share.

    Attributes:
        LISTS: fields that a form may have several times.
        OBJECTS: fields that are JSON in a form.
        task: what the model does, as its own token names it.
    """

    LISTS: ClassVar = ("timestamp_granularities", "include")
    OBJECTS: ClassVar = ("vllm_xargs", "chunking_strategy")
    task: ClassVar[Literal["transcribe", "translate"]] = "transcribe"

    model: str | None = None
    timeout: float | None = None
    language: str | None = None
    prompt: str = ""
    response_format: ResponseFormat = "json"
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    hotwords: str | None = None
    to_language: str | None = None
    use_beam_search: bool = False
    n: int = 1
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    max_completion_tokens: int | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    watermarking: bool | None = None
    timestamp_granularities: list[Granularity] = []
    include: list[str] = []
    chunking_strategy: Any = None
    priority: int = 0

    @property
    def wants_timestamps(self) -> bool:
        """True if the answer has times."""
        return self.response_format in ("verbose_json", *SUBTITLES)

    @property
    def wants_words(self) -> bool:
        """True if the answer has times of words."""
        return "word" in self.timestamp_granularities

    @property
    def falls_back(self) -> bool:
        """True if clips whose text looks wrong are written again, at rising temperatures: the request has none."""
        return self.temperature is None and not self.use_beam_search and not self.stream

    def check(self) -> None:
        """Checks the fields against one another.

        Raises:
            ParameterError: a field, by name.
        """
        refuse_unsupported(self)
        for param, reason in self._refusals():
            raise ParameterError(f"{param} is refused: {reason}.", param=param)

    def _refusals(self) -> list[tuple[str, str]]:
        """(field, reason) of all that is refused."""
        found = []
        if self.response_format == "diarized_json":
            found.append(("response_format", "no served model tells speakers apart; ask for verbose_json"))
        if self.timestamp_granularities and self.response_format != "verbose_json":
            found.append(("timestamp_granularities", "it needs the response_format verbose_json"))
        if self.stream and self.wants_timestamps:
            found.append(("stream", f"the response_format {self.response_format} comes whole; ask for json or text"))
        if self.stream and self.use_beam_search:
            found.append(("stream", "the outputs of a beam search are known at its end"))
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                found.append((name, "it needs stream=true"))
        if self.use_beam_search and self.wants_timestamps:
            found.append(("use_beam_search", f"beams follow no rules about the times of {self.response_format}"))
        if self.n != 1 and not self.use_beam_search:
            found.append(("n", "it is the number of beams; add use_beam_search=true"))
        if self.include_stop_str_in_output and not self.use_beam_search:
            found.append(("include_stop_str_in_output", "it is for beam search; add use_beam_search=true"))
        if self.hotwords:
            found.append(("hotwords", "the model takes none; put the words into prompt"))
        if self.include:
            found.append(("include", f"{self.include[0]!r} is not served here"))
        if self.chunking_strategy not in (None, "auto"):
            found.append(("chunking_strategy", "sounds are divided at quiet places ('auto')"))
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            found.append(("max_completion_tokens", f"it must be at least 1, got {self.max_completion_tokens}"))
        return found

    def sampling_fields(self) -> dict[str, Any]:
        """SamplingParams keywords of the sampling fields."""
        fields = read_sampling(self)
        return {**fields, "n": 1, "temperature": self.temperature or 0.0, "include_stop_str_in_output": False}


class TranscriptionRequest(SpeechRequest, forbid_unknown_fields=True, kw_only=True):
    """Text in the language of the sound."""


class TranslationRequest(SpeechRequest, forbid_unknown_fields=True, kw_only=True):
    """Text in English. `language` is that of the sound."""

    task: ClassVar[Literal["transcribe", "translate"]] = "translate"
