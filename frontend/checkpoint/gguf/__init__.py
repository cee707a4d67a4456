"""Reads a GGUF file's metadata as the files of a checkpoint's folder."""

from quire.frontend.checkpoint.gguf.files import choose, parts_of
from quire.frontend.checkpoint.gguf.folder import cache_folder, make_folder

__all__ = ["cache_folder", "choose", "make_folder", "parts_of"]
