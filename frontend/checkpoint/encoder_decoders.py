"""Models with an encoder and a decoder of text: what config.json and generation_config.json say of each side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from quire.core.config.resolved import EncoderSpec
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.config_defaults import complete
from quire.frontend.checkpoint.image_encoders import read_image_facts
from quire.frontend.checkpoint.speech_tokens import SpeechTokens

_GENERATING_ENDS = ("ForConditionalGeneration", "MTModel", "VisionEncoderDecoderModel")
"""The ends of names of such models' classes that generate text."""

_PROMPTED = ("donut-swin",)
"""Types of encoders whose decoder's prompt `generate` of Transformers leaves as it is."""

DECODER_FIELDS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("decoder_vocab_size", "tgt_vocab_size"),
    "num_layers": ("decoder_layers", "num_decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads"),
    "max_position_embeddings": ("max_decoder_position_embeddings",),
}
"""Our name, then fields that say it of the decoder alone. Other fields may say it of the encoder."""


class DecoderRules(Struct, frozen=True, kw_only=True):
    """What the decoder's sequences begin and end with, and the tokens that they do not have.

    These are the fields of generation_config.json that `generate` of Transformers obeys, by their names there.
    """

    decoder_start_token_id: int
    forced_bos_token_id: int | None = None  # follows the first token, unless a request's decoder prompt is longer
    forced_eos_token_id: list[int] = []  # the last token of an output of full length is one of them
    bad_words_ids: list[list[int]] = []  # `suppress_tokens` included
    begin_suppress_tokens: list[int] = []  # not the first token of an output
    min_length: int = 0  # tokens of the decoder's prompt and output, before which none ends it
    speech: SpeechTokens | None = None  # of a model that hears; None: its encoder reads text or images
    has_own_start: bool = True  # a prompt that begins otherwise gets the start token

    def begin(self, token_ids: list[int]) -> list[int]:
        """The decoder's prompt, of the token ids that a request gives for it."""
        if self.speech is not None:
            return self.speech.begin(token_ids)
        if token_ids[:1] != [self.decoder_start_token_id] and (self.has_own_start or not token_ids):
            token_ids = [self.decoder_start_token_id, *token_ids]
        if len(token_ids) == 1 and self.forced_bos_token_id is not None:
            return [*token_ids, self.forced_bos_token_id]
        return token_ids


def is_encoder_decoder(config: Mapping[str, Any], architecture: str) -> bool:
    """Returns True if the checkpoint's decoder attends to an encoder, and generates text."""
    return bool(config.get("is_encoder_decoder")) and architecture.endswith(_GENERATING_ENDS)


def with_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the fields of its object `decoder` at the top, where there is one of a model with both sides.

    Both sides get the defaults of their classes.
    """
    inner, encoder = config.get("decoder"), config.get("encoder")
    if not config.get("is_encoder_decoder") or not isinstance(inner, dict):
        return dict(config)
    whole = {**complete(inner), **{name: value for name, value in config.items() if name != "decoder"}}
    return {**whole, "encoder": complete(encoder)} if isinstance(encoder, dict) else whole


def read_encoder_spec(config: Mapping[str, Any], max_positions: int, vocab_size: int) -> EncoderSpec:
    """The facts of the encoder.

    Args:
        max_positions: of the decoder's sequences, and of the encoder's where `config` has no other number.
        vocab_size: of the decoder.
    """
    inner = config.get("encoder")
    own = {**config, **inner} if isinstance(inner, dict) else config
    if isinstance(channels := own.get("num_mel_bins"), int) and isinstance(
        rows := own.get("max_source_positions"), int
    ):
        return EncoderSpec(vocab_size=vocab_size, max_rows=rows, num_channels=channels)
    if isinstance(inner, dict) and (image := read_image_facts(inner)) is not None:
        return EncoderSpec(
            vocab_size=vocab_size,
            max_rows=image.num_rows,
            num_channels=inner.get("num_channels", 3),
            image_size=(image.height, image.width),
        )
    own_size = own.get("src_vocab_size") or own.get("vocab_size")
    own_positions = own.get("max_encoder_position_embeddings") or own.get("max_position_embeddings")
    return EncoderSpec(
        vocab_size=own_size if isinstance(own_size, int) else vocab_size,
        max_rows=own_positions if isinstance(own_positions, int) else max_positions,
    )


def read_decoder_rules(config: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> DecoderRules:
    """The rules of a checkpoint. If there is no generation_config.json, the same fields of config.json count.

    Args:
        path: of config.json, for messages.

    Raises:
        ConfigError: a field is no token id, or list of them; or nothing says what the decoder begins with.
    """
    source = generation or config
    start = next((ids[name] for ids in (generation, config) for name in _STARTS if ids.get(name) is not None), None)
    if type(start) is not int:
        raise ConfigError(
            f"{path}: the decoder needs a decoder_start_token_id, and neither this file nor generation_config.json has "
            "one. Add it with --hf-overrides '{\"decoder_start_token_id\": ID}'."
        )
    suppressed = [[token_id] for token_id in _ids(source, "suppress_tokens", path)]
    return DecoderRules(
        decoder_start_token_id=start,
        forced_bos_token_id=next(iter(_ids(source, "forced_bos_token_id", path)), None),
        forced_eos_token_id=_ids(source, "forced_eos_token_id", path),
        bad_words_ids=[*_sequences(source, "bad_words_ids", path), *suppressed],
        begin_suppress_tokens=_ids(source, "begin_suppress_tokens", path),
        min_length=source.get("min_length") or 0,
        has_own_start=(config.get("encoder") or {}).get("model_type") not in _PROMPTED,
    )


_STARTS = ("decoder_start_token_id", "bos_token_id")


def _ids(source: Mapping[str, Any], name: str, path: Path) -> list[int]:
    """The ids in a field: one, or a list; negative ones, which some files have for none, are left out."""
    value = source.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ConfigError(f"{path.parent}: {name} must be a token id or a list of them, got {value!r}.")
    return [token_id for token_id in ids if token_id >= 0]


def _sequences(source: Mapping[str, Any], name: str, path: Path) -> list[list[int]]:
    value = source.get(name) or []
    if not all(isinstance(ids, list) and ids and set(map(type, ids)) == {int} for ids in value):
        raise ConfigError(f"{path.parent}: {name} must be a list of lists of token ids, got {value!r}.")
    return value
