"""Models without a file here: the checkpoint's Transformers class, with its layers replaced by ours.

Other code sees only the names below; docs/design/transformers.md explains the insides. The import takes a second,
because it imports Transformers.
"""

from quire.executor.models.transformers.beside import build_towers_beside
from quire.executor.models.transformers.image_encoder import build_image_encoder
from quire.executor.models.transformers.model import TransformersModel, build_transformers_model
from quire.executor.models.transformers.skeleton import UnknownModelError

__all__ = [
    "TransformersModel",
    "UnknownModelError",
    "build_image_encoder",
    "build_towers_beside",
    "build_transformers_model",
]
