"""Reads a GGUF file's metadata as the files of a checkpoint's folder."""

from quire.frontend.checkpoint.gguf.files import choose, parts_of
from quire.frontend.checkpoint.gguf.folder import make_folder

__all__ = ["choose", "make_folder", "parts_of"]
