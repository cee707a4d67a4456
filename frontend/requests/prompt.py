"""The forms of a prompt that callers may pass, and `Prompt`, the form after reading."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.encoder_input import Features
from quire.core.wire.field_types import plain_numbers
from quire.core.wire.media import MediaItem
from quire.core.wire.protocol import PromptEmbeds
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.media.sources import MediaPart

MAX_EMBEDS_BYTES = 2**30
"""Largest size of one request's embeddings."""

ReadEmbeds = Callable[[Any, int], tuple[PromptEmbeds, int]]
"""Reads (given value, max_model_len) into (rows, number of rows); raises ParameterError."""


class TextPrompt(TypedDict):
    """A prompt as text. Only requests with the same `cache_salt` share pages in the prefix cache.

    `multi_modal_data` has its images, by kind; the text has a placeholder for each. `mm_processor_kwargs` are keywords
    of the model's processor for them.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids; a `prompt` is their text, for outputs to show."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings [num_tokens, hidden]: a torch tensor, a NumPy array, or a safetensors file as bytes or in
    base64. A `prompt` is its text, for outputs to show.
    """

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt for each side of a model with an encoder and a decoder.

    Without a `decoder_prompt`, the decoder begins as the checkpoint says.
    """

    encoder_prompt: "str | list[int] | TextPrompt | TokensPrompt"
    decoder_prompt: "NotRequired[str | list[int] | TextPrompt | TokensPrompt | None]"


class DataPrompt(TypedDict):
    """Data of any kind, which a plugin makes prompts of."""

    data: Any


class ItemsPrompt(Struct, frozen=True):
    """A text with a placeholder for each of its images, videos and sounds, in order."""

    text: str
    items: Sequence[MediaPart]


PromptDict = TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt
PromptLike = str | list[int] | PromptDict | ItemsPrompt
_OF_MEDIA = ("multi_modal_data", "multi_modal_uuids")
_KEYS = {key for kind in (TextPrompt, TokensPrompt, EmbedsPrompt) for key in kind.__annotations__}


class EncoderPrompt(NamedTuple):
    """What an encoder reads: its text, if it came as text, and its token ids; or features in their place."""

    text: str | None
    token_ids: list[int]
    features: Features | None = None


class Prompt(NamedTuple):
    """A prompt that has been read: its text, if it came as text, and its token ids, which are zeros for embeddings.

    `token_type_ids` are the segments of its tokens, of a pair of texts; None: all are of the first. If the model has an
    encoder, the prompt is the decoder's, and `encoder` is what the encoder reads. The mean of its tokens leaves the
    first `num_lead_tokens` out. `media` are its images, with their places among the tokens.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    token_type_ids: list[int] | None = None
    encoder: EncoderPrompt | None = None
    num_lead_tokens: int = 0
    media: Sequence[MediaItem] = ()

    @property
    def content(self) -> tuple[object, ...]:
        """What its vectors follow from."""
        types = None if self.token_type_ids is None else tuple(self.token_type_ids)
        items = tuple(item.digest for item in self.media)
        return tuple(self.token_ids), types, self.num_lead_tokens, items, self.cache_salt

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides."""
        return len(self.token_ids) + (0 if self.encoder is None else len(self.encoder.token_ids))


def is_explicit(prompt: Any) -> bool:
    """Returns True for a prompt of the form `ExplicitEncoderDecoderPrompt`."""
    return isinstance(prompt, dict) and ("encoder_prompt" in prompt or "decoder_prompt" in prompt)


def split_sides(prompt: Any) -> tuple[Any, Any]:
    """(the encoder's prompt, the decoder's or None).

    Raises:
        ParameterError: an explicit prompt lacks the encoder's, or holds something else.
    """
    if not is_explicit(prompt):
        return prompt, None
    unknown = {key for key, value in prompt.items() if value is not None} - {"encoder_prompt", "decoder_prompt"}
    if unknown:
        raise ParameterError(
            f"A prompt with encoder_prompt cannot hold {sorted(unknown)[0]!r}; each side is a prompt of its own.",
            param="prompt",
        )
    if prompt.get("encoder_prompt") is None:
        raise ParameterError("A prompt with decoder_prompt needs an encoder_prompt.", param="encoder_prompt")
    return prompt["encoder_prompt"], prompt.get("decoder_prompt")


def split_prompt(prompt: PromptLike) -> tuple[str | None, list[int] | None, str | None]:
    """(text, ids, cache salt); text and ids are both None only for embeddings.

    Raises:
        ParameterError: `prompt` has none of the forms of a prompt.
    """
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, dict):
        return _split_dict(prompt)
    if isinstance(prompt, (list, tuple)) or hasattr(prompt, "tolist"):
        return None, _checked_ids(prompt), None
    raise ParameterError(
        f"A prompt is a string, a list of token ids or a dictionary, not {type(prompt).__name__}.", param="prompt"
    )


def refuse_kwargs(prompt: Any) -> None:
    """Raises ParameterError if a prompt has keywords of a processor, for a model that takes none."""
    if isinstance(prompt, dict) and prompt.get("mm_processor_kwargs"):
        raise ParameterError(
            "mm_processor_kwargs are for models that read images, videos or sounds in prompts; leave them out.",
            param="mm_processor_kwargs",
        )


def with_text(prompt: PromptLike, text: str | None) -> PromptLike:
    """Adds to a prompt of token ids the text that outputs show for it; returns any other prompt unchanged."""
    if text is None or not isinstance(prompt, (list, tuple)):
        return prompt
    return TokensPrompt(prompt_token_ids=list(prompt), prompt=text)


def _split_dict(prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None, str | None]:
    unknown = {key for key, value in prompt.items() if value is not None} - _KEYS
    if unknown:
        raise ParameterError(f"A prompt cannot hold {sorted(unknown)[0]!r}.", param="prompt")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    has_embeds = prompt.get("prompt_embeds") is not None
    if (
        text is None
        and token_ids is None
        and not has_embeds
        and any(prompt.get(name) is not None for name in _OF_MEDIA)
    ):
        text = ""  # an item may be a prompt by itself
    if has_embeds and token_ids is not None:
        raise ParameterError("A prompt is either prompt_token_ids or prompt_embeds.", param="prompt_embeds")
    if isinstance(text, str) or (text is None and (token_ids is not None or has_embeds)):
        return text, None if token_ids is None else _checked_ids(token_ids), prompt.get("cache_salt")
    raise ParameterError(
        "A prompt dictionary needs a string 'prompt', 'prompt_token_ids' or 'prompt_embeds'.", param="prompt"
    )


def _checked_ids(token_ids: Any) -> list[int]:
    if not _are_ids(token_ids):
        token_ids = plain_numbers(token_ids)
        if not _are_ids(token_ids):
            raise ParameterError("Token ids must be a list of whole numbers.", param="prompt")
    return list(token_ids)


def _are_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and {int}.issuperset(map(type, value))


def check_embeds(sampling: SamplingParams) -> None:
    """Refuses sampling parameters that need the prompt's token ids, which embeddings do not have.

    Raises:
        ParameterError: the parameter, by name.
    """
    if sampling.scores_prompt:
        raise ParameterError(
            "prompt_logprobs and prompt_logprob_token_ids score the prompt's token ids, which prompt_embeds have none "
            "of; leave one out.",
            param="prompt_logprobs",
        )
