"""Whether a model's towers for images and sounds are loaded."""

from pathlib import Path

from quire.core.config.multimodal import MultimodalConfig
from quire.core.config.resolved import ModelSpec
from quire.core.wire.rank import Layout

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_NAMES = {"image": ("image", "vision"), "video": ("video",), "audio": ("audio",)}
"""Beginnings of the names that config.json has for what a model reads of a kind."""


def reads_media(config: MultimodalConfig, spec: ModelSpec, layout: Layout) -> bool:
    """True if the checkpoint says how images or sounds are processed, and nothing asks for its text model alone. A
    limit of no items, of all kinds that it reads, does.

    Towers run on ranks that compute whole sequences from the first layer to the last.
    """
    if spec.is_encoder and not spec.embeds_images:
        return False
    has_processor = any((Path(spec.path) / name).is_file() for name in PROCESSOR_FILES)
    kinds = [kind for kind, names in _NAMES.items() if any(name.startswith(names) for name in spec.config_json)]
    is_wanted = not config.language_model_only and any(config.limit_of(kind) > 0 for kind in kinds or _NAMES)
    return is_wanted and has_processor and layout.pipeline == 1 and layout.sequence == 1 and not layout.shares_experts
