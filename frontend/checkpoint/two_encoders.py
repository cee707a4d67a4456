"""Models with an encoder of texts and one of images, whose vectors lie in one space: what config.json says of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_TEXT_TYPES = {
    "clip": "clip_text_model",
    "siglip": "siglip_text_model",
    "siglip2": "siglip_text_model",  # of the same form
}
"""Model types, and the type of their texts' encoder."""
_FILLED = ("siglip", "siglip2")
"""Those whose texts are filled up to their full length with tokens that the others see."""
_SIZE = 512
"""Elements of a vector of CLIP's, where config.json does not say."""


class TwoEncoders(NamedTuple):
    """The facts that their texts' encoder does not have.

    Attributes:
        size: elements of a vector.
        fills_texts: texts have all the tokens that the model takes.
    """

    size: int
    fills_texts: bool


def read_two_encoders(config: Mapping[str, Any]) -> TwoEncoders | None:
    """The facts of such a model; None for another one, or its encoder of texts alone."""
    text, kind = config.get("text_config"), config.get("model_type")
    if kind not in _TEXT_TYPES or not isinstance(text, dict) or not isinstance(config.get("vision_config"), dict):
        return None
    if kind in _FILLED:
        return TwoEncoders(text.get("projection_size") or text.get("hidden_size") or 768, fills_texts=True)
    return TwoEncoders(config.get("projection_dim") or _SIZE, fills_texts=False)


def with_text_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` of such a model with the type of its encoder of texts; of others as it is."""
    if read_two_encoders(config) is None:
        return dict(config)
    return {**config, "text_config": {**config["text_config"], "model_type": _TEXT_TYPES[config["model_type"]]}}
