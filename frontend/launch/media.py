"""Whether a model's towers for images and sounds are loaded."""

from pathlib import Path

from quire.core.config.multimodal import MultimodalConfig
from quire.core.config.resolved import ModelSpec
from quire.core.wire.rank import Layout

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def reads_media(config: MultimodalConfig, spec: ModelSpec, layout: Layout) -> bool:
    """True if the checkpoint says how images or sounds are processed, and nothing asks for its text model alone.

    Towers run on ranks that compute whole sequences from the first layer to the last.
    """
    has_processor = any((Path(spec.path) / name).is_file() for name in PROCESSOR_FILES)
    is_wanted = not config.language_model_only and any(config.limit_of(each) > 0 for each in ("image", "audio"))
    return is_wanted and has_processor and layout.pipeline == 1 and layout.sequence == 1 and not layout.shares_experts
