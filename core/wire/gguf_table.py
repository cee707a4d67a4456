"""The table of contents of a GGUF model: the frontend reads the files' headers, workers map their tensors."""

from pathlib import Path

import msgspec
from msgspec import Struct

from quire.core.errors import ModelLoadError

FILE_NAME = "gguf.json"
"""Its name in the model's folder, beside the configuration and tokenizer that were made from the metadata."""


class GgufTensor(Struct, frozen=True, array_like=True):
    """The place of a tensor.

    Attributes:
        type: ggml's name of the elements' format: F32, Q8_0, Q4_K, …
        shape: outermost dimension first, as in PyTorch.
        file: index into the table's files.
        offset: of its first byte in the file.
    """

    type: str
    shape: tuple[int, ...]
    file: int
    offset: int


class GgufTable(Struct, frozen=True, kw_only=True):
    """The tensors of a model.

    Attributes:
        architecture: `general.architecture` of the metadata.
        files: their absolute paths; empty where the tensors are in a packed model.
        tensors: by the names that they have in the files.
    """

    architecture: str
    files: list[str]
    tensors: dict[str, GgufTensor]


def read_gguf_table(path: Path) -> GgufTable:
    """The table in the file `path`.

    Raises:
        ModelLoadError: it is no such table.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=GgufTable)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. Remove its folder, and start with the GGUF file.") from None
