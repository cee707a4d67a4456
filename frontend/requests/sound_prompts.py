"""Reads prompts of models whose encoder hears: a sound for the encoder, and text or token ids for the decoder."""

from typing import Any

from quire.core.errors import ParameterError
from quire.frontend.checkpoint.encoder_decoders import DecoderRules
from quire.frontend.media.hearing import Hearing
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import (
    EncoderPrompt,
    Prompt,
    PromptLike,
    is_explicit,
    refuse_kwargs,
    split_prompt,
    split_sides,
)
from quire.frontend.requests.prompt_reader import PromptReader
from quire.frontend.requests.request_fields import check_salt
from quire.frontend.text.truncation import Truncation

_DATA = "multi_modal_data"
_PARAM = f"{_DATA}.audio"


class SoundPromptReader(PromptReader):
    """Reads prompts with one sound. A plain prompt is the decoder's, and brings the sound beside it.

    Args:
        vocab_size: of the decoder.
        rules: what the decoder's prompts begin with.
        hearing: reads sounds.
    """

    def __init__(
        self,
        tokenizer: AsyncTokenizer,
        limit: ContextLimit,
        *,
        vocab_size: int,
        rules: DecoderRules,
        hearing: Hearing,
    ) -> None:
        super().__init__(tokenizer, limit, vocab_size=vocab_size)
        self._rules = rules
        self._hearing = hearing

    async def read(
        self, prompt: PromptLike | Prompt, *, add_special_tokens: bool = True, must_fit: bool = True
    ) -> Prompt:
        """Reads a prompt in one of these forms, or a `Prompt` with features. The decoder's text gets no special tokens,
        whatever `add_special_tokens` is.

        - `{"prompt": "<|startoftranscript|>...", "multi_modal_data": {"audio": (samples, rate)}}`, or with
          `prompt_token_ids`
        - `{"encoder_prompt": {"prompt": "", "multi_modal_data": ...}, "decoder_prompt": ...}`

        Raises:
            ParameterError: the prompt has none of these forms, or cannot be read.
        """
        if isinstance(prompt, Prompt):
            if prompt.encoder is None or prompt.encoder.features is None:
                raise _needs_sound()
            return self._fitting(prompt)
        sound, of_decoder = _split(prompt)
        decoder = Prompt(None, [])
        if of_decoder is not None:
            text, token_ids, salt = split_prompt(of_decoder)
            check_salt(salt)
            if token_ids is None:
                assert text is not None
                token_ids = await self._tokenizer.tokenize(text, add_special_tokens=False, must_fit=must_fit)
            decoder = Prompt(text, token_ids, salt)
        heard = await self._hearing.read_value(sound, _PARAM)
        encoder = EncoderPrompt(None, [], heard.clips[0].features)
        return self._fitting(decoder._replace(token_ids=self._rules.begin(decoder.token_ids), encoder=encoder))

    def _fitting(self, prompt: Prompt) -> Prompt:
        if len(prompt.token_ids) > self._limit.longest_prompt:
            raise self._limit.too_long(len(prompt.token_ids))
        return self._checked(prompt)

    def truncate(
        self,
        prompt: Prompt,
        truncation: Truncation,
        max_tokens: int | None,
        *,
        has_special_tokens: bool,
        num_before: int = 0,
    ) -> Prompt:
        """Refuses to cut: the decoder's prompt says what to do."""
        raise ParameterError(
            "truncate_prompt_tokens is not for prompts with a sound; leave it out.", param="truncate_prompt_tokens"
        )


def _split(prompt: Any) -> tuple[Any, Any]:
    """(the sound, the decoder's prompt or None)."""
    if not is_explicit(prompt):
        return _without_sound(prompt)
    of_encoder, of_decoder = split_sides(prompt)
    if isinstance(of_decoder, dict) and of_decoder.get(_DATA) is not None:
        raise ParameterError(f"{_DATA} belongs to encoder_prompt, not to decoder_prompt.", param="decoder_prompt")
    sound, rest = _without_sound(of_encoder, "encoder_prompt")
    if rest is not None and any(split_prompt(rest)[:2]):
        raise ParameterError(
            "The encoder hears a sound and reads no text; give encoder_prompt an empty prompt, and the text to "
            "decoder_prompt.",
            param="encoder_prompt",
        )
    return sound, of_decoder


def _without_sound(prompt: Any, param: str = "prompt") -> tuple[Any, Any]:
    """(the sound, the rest of the prompt or None)."""
    refuse_kwargs(prompt)
    data = prompt.get(_DATA) if isinstance(prompt, dict) else None
    if not isinstance(data, dict) or data.get("audio") is None:
        raise _needs_sound()
    if unknown := {key for key, value in data.items() if value is not None} - {"audio"}:
        raise ParameterError(f"The model hears, and {_DATA} holds {sorted(unknown)[0]!r}; give audio.", param=_DATA)
    rest = {key: value for key, value in prompt.items() if key != _DATA and value is not None}
    if rest.get("prompt_embeds") is not None:
        raise ParameterError(f"prompt_embeds are not for models that hear; give {param} as text.", param=param)
    return data["audio"], rest if rest.get("prompt") or rest.get("prompt_token_ids") else None


def _needs_sound() -> ParameterError:
    return ParameterError(
        "This model writes what it hears, and the prompt has no sound: give multi_modal_data={'audio': (samples, "
        "rate)} with a prompt, or send a file to /v1/audio/transcriptions.",
        param=_DATA,
    )
