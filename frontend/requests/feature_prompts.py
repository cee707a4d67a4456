"""Reads prompts of models whose encoder hears or sees: a sound or an image for it, and text for the decoder."""

from typing import Any, Protocol

from quire.core.errors import ParameterError
from quire.core.wire.encoder_input import Features
from quire.core.wire.media import Modality
from quire.frontend.checkpoint.encoder_decoders import DecoderRules
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
_NEEDED: dict[Modality, str] = {
    "audio": "This model writes what it hears, and the prompt has no sound: give multi_modal_data={'audio': (samples, "
    "rate)} with a prompt, or send a file to /v1/audio/transcriptions.",
    "image": "This model writes what it sees, and the prompt has no image: give multi_modal_data={'image': image}, or "
    "a part image_url of a message.",
}


class FeatureSource(Protocol):
    """Reads what the encoder does.

    Attributes:
        modality: of that.
    """

    modality: Modality

    async def features_of(self, value: Any, param: str) -> Features:
        """The features of a sound or an image that a program gives. Raises ParameterError; `param` names it."""
        ...


class FeaturePromptReader(PromptReader):
    """Reads prompts with one sound or image. A plain prompt is the decoder's, and brings that beside it.

    Args:
        vocab_size: of the decoder.
        rules: what the decoder's prompts begin with.
        source: reads sounds or images.
    """

    def __init__(
        self,
        tokenizer: AsyncTokenizer,
        limit: ContextLimit,
        *,
        vocab_size: int,
        rules: DecoderRules,
        source: FeatureSource,
    ) -> None:
        super().__init__(tokenizer, limit, vocab_size=vocab_size)
        self._rules = rules
        self._source = source

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
                raise self._needs()
            return self._fitting(prompt)
        value, of_decoder = self._split(prompt)
        decoder = Prompt(None, [])
        if of_decoder is not None:
            text, token_ids, salt = split_prompt(of_decoder)
            check_salt(salt)
            if token_ids is None:
                assert text is not None
                token_ids = await self._tokenizer.tokenize(text, add_special_tokens=False, must_fit=must_fit)
            decoder = Prompt(text, token_ids, salt)
        features = await self._source.features_of(value, f"{_DATA}.{self._source.modality}")
        return self._fitting(self.begun(decoder, features))

    def begun(self, decoder: Prompt, features: Features) -> Prompt:
        """The decoder's prompt with its first tokens, beside what the encoder reads."""
        encoder = EncoderPrompt(None, [], features)
        return decoder._replace(token_ids=self._rules.begin(decoder.token_ids), encoder=encoder)

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
        what = "a sound" if self._source.modality == "audio" else "an image"
        raise ParameterError(
            f"truncate_prompt_tokens is not for prompts with {what}; leave it out.", param="truncate_prompt_tokens"
        )

    def _split(self, prompt: Any) -> tuple[Any, Any]:
        """(the sound or image, the decoder's prompt or None)."""
        if not is_explicit(prompt):
            return self._without_item(prompt)
        of_encoder, of_decoder = split_sides(prompt)
        if isinstance(of_decoder, dict) and of_decoder.get(_DATA) is not None:
            raise ParameterError(f"{_DATA} belongs to encoder_prompt, not to decoder_prompt.", param="decoder_prompt")
        value, rest = self._without_item(of_encoder, "encoder_prompt")
        if rest is not None and any(split_prompt(rest)[:2]):
            does = "hears a sound" if self._source.modality == "audio" else "sees an image"
            raise ParameterError(
                f"The encoder {does} and reads no text; give encoder_prompt an empty prompt, and the text to "
                "decoder_prompt.",
                param="encoder_prompt",
            )
        return value, of_decoder

    def _without_item(self, prompt: Any, param: str = "prompt") -> tuple[Any, Any]:
        """(the sound or image, the rest of the prompt or None)."""
        refuse_kwargs(prompt)
        modality = self._source.modality
        data = prompt.get(_DATA) if isinstance(prompt, dict) else None
        if not isinstance(data, dict) or data.get(modality) is None:
            raise self._needs()
        if unknown := {key for key, value in data.items() if value is not None} - {modality}:
            does = "hears" if modality == "audio" else "sees"
            raise ParameterError(
                f"The model {does}, and {_DATA} holds {sorted(unknown)[0]!r}; give {modality}.", param=_DATA
            )
        rest = {key: value for key, value in prompt.items() if key != _DATA and value is not None}
        if rest.get("prompt_embeds") is not None:
            raise ParameterError(
                f"prompt_embeds are not for models whose encoder reads features; give {param} as text.", param=param
            )
        return data[modality], rest if rest.get("prompt") or rest.get("prompt_token_ids") else None

    def _needs(self) -> ParameterError:
        return ParameterError(_NEEDED[self._source.modality], param=_DATA)
