"""How models that take sounds in prompts are asked to write what they hear: in words, or by tokens of their own."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from quire.frontend.audio.languages import NAMES
from quire.frontend.audio.schema import SpeechRequest


class Instruction(NamedTuple):
    """What a model is asked.

    Attributes:
        write: what stands beside the sound in the user's message; or, if it `is_whole`, the prompt, where `{sound}`
            stands for the sound.
        clip_seconds: longer sounds are divided; None: only where the model hears no more at once.
        is_whole: there is no message around it.
        translates: the model writes in another language than the sound's.
        takes_prompt: the request's own `prompt` may follow.
    """

    write: Callable[[SpeechRequest], str]
    clip_seconds: float | None = 30.0
    is_whole: bool = False
    translates: bool = True
    takes_prompt: bool = True


def written_language(request: SpeechRequest) -> str:
    """The name of the language that a translation is written in."""
    return NAMES[(request.to_language or "en").lower()]


def _plain(request: SpeechRequest) -> str:
    heard = None if request.language is None else NAMES[request.language.lower()]
    if request.task == "transcribe":
        return "Transcribe this audio." if heard is None else f"Transcribe this audio into {heard}."
    source = "" if heard is None else f" from {heard}"
    return f"Translate this audio{source} into {written_language(request)}."


def _polite(request: SpeechRequest) -> str:
    if request.task == "transcribe":
        return "can you transcribe the speech into a written format?"
    return f"translate the speech to {written_language(request)}"


def _by_tokens(request: SpeechRequest) -> str:
    language = "" if request.language is None else f"lang:{request.language.lower()}"
    return f"<s>[INST]{{sound}}[/INST]{language}[TRANSCRIBE]"


_POLITE = Instruction(_polite)
_BY_TYPE: Mapping[str, Instruction] = {
    "granite_speech": _POLITE,
    "glmasr": _POLITE,
    "voxtral": Instruction(_by_tokens, None, is_whole=True, translates=False, takes_prompt=False),
    "qwen2_5_omni": Instruction(_plain, None),
    "qwen3_omni_moe": Instruction(_plain, None),
}
"""By model type of config.json, as vLLM asks those that it transcribes with."""


def instruction_of(model_type: str) -> Instruction:
    """What models of a type are asked."""
    return _BY_TYPE.get(model_type, Instruction(_plain))
