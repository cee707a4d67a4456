"""Makes a checkpoint's folder of a GGUF model: configuration and tokenizer of the metadata, the weights where they are.

The folder lies in the user's cache, and is made once for each version of the files.
"""

import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.core import envs
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.core.wire.gguf_table import FILE_NAME, GgufTable, GgufTensor
from quire.frontend.checkpoint.gguf.checks import check_tensors, check_values
from quire.frontend.checkpoint.gguf.config import check_model, make_config
from quire.frontend.checkpoint.gguf.fields import Fields
from quire.frontend.checkpoint.gguf.fused import absent_biases, apart, tensors_of_metadata
from quire.frontend.checkpoint.gguf.header import Header, TensorInfo, check_installed, read_header
from quire.frontend.checkpoint.gguf.tokenizer import make_generation_config, make_tokenizer, make_tokenizer_config

logger = get_logger(__name__)

_VERSION = 8
"""Of the folders' content; a new one makes them anew."""
_VALUES = "values.bin"
"""Float32 numbers that models have as tensors, and files as metadata; then zeros, for biases that files leave out."""
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def make_folder(files: Sequence[Path]) -> Path:
    """Makes the checkpoint's folder for the model in `files`, all its parts in order.

    Raises:
        ConfigError: a file that cannot be read, or a model that is not supported.
    """
    check_installed(files[0])
    folder = cache_folder() / f"{files[0].stem}-{_digest(files)}"
    if not (folder / FILE_NAME).is_file():
        folder = _write(folder, files)
    if not (folder / "tokenizer.json").is_file():
        logger.warning("%s has no tokenizer that is read here: name one with --tokenizer", files[0])
    return folder


def cache_folder() -> Path:
    """Where the folders of GGUF models lie."""
    return envs.cache_folder() / "gguf"


def _digest(files: Sequence[Path]) -> str:
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((_VERSION, facts)).encode()).hexdigest()[:16]


def _write(folder: Path, files: Sequence[Path]) -> Path:
    """Writes the folder under a temporary name and renames it, so that no other process sees an incomplete one."""
    headers = [read_header(path) for path in files]
    try:
        contents = _contents(headers, folder / _VALUES)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{files[0]}: its metadata do not describe a model ({error!r}). Download it again, or serve the repository "
            "that the file was made from."
        ) from None
    draft: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        for name, content in contents.items():
            (draft / name).write_bytes(content)
    except OSError as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        raise ConfigError(
            f"Cannot write to {folder.parent} ({error.strerror}), where the configuration of GGUF files is kept: set "
            "QUIRE_CACHE_ROOT to another folder."
        ) from None
    try:
        draft.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
    return folder


def _contents(headers: Sequence[Header], values_file: Path) -> dict[str, bytes]:
    """The bytes of the folder's files by their names; `values_file` is where the one of `_VALUES` will be."""
    first = headers[0]
    path, metadata = str(first.path), first.metadata
    tensors = {name: (index, info) for index, header in enumerate(headers) for name, info in header.tensors.items()}
    stored = Fields(path, metadata, {name: info for name, (_, info) in tensors.items()})
    check_model(stored)
    check_values(path, metadata, max(size for tensor in stored.tensors.values() for size in tensor.shape))
    check_tensors(stored, len(metadata.get("tokenizer.ggml.tokens", ())))
    factors = {
        name: _factors(headers[tensors[name][0]].path, name, tensors[name][1]) for name in _FACTORS if name in tensors
    }
    tensors = apart(stored, tensors)
    fields = Fields(path, metadata, {name: info for name, (_, info) in tensors.items()}, factors)
    config = make_config(fields)
    generation = make_generation_config(metadata)
    values, zeros = tensors_of_metadata(metadata), absent_biases(fields)
    tensors |= {name: (len(headers), TensorInfo("F32", (1,), 4 * index)) for index, name in enumerate(values)}
    tensors |= {name: (len(headers), TensorInfo("F32", (size,), 4 * len(values))) for name, size in zeros.items()}
    numbers = [*values.values(), *[0.0] * max(zeros.values(), default=0)]
    table = GgufTable(
        architecture=fields.architecture,
        files=[str(header.path) for header in headers] + [str(values_file)] * bool(numbers),
        tensors={
            name: GgufTensor(info.type, info.shape, index, info.offset) for name, (index, info) in tensors.items()
        },
    )
    texts = {
        "config.json": json.dumps({**config, "eos_token_id": generation["eos_token_id"]}, indent=1),
        "generation_config.json": json.dumps(generation),
        "tokenizer_config.json": json.dumps(make_tokenizer_config(metadata)),
        FILE_NAME: msgspec.json.encode(table).decode(),
    }
    texts |= _tokenizer(path, metadata)
    contents = {name: text.encode() for name, text in texts.items()}
    return contents | ({_VALUES: struct.pack(f"<{len(numbers)}f", *numbers)} if numbers else {})


def _tokenizer(path: str, metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.json; nothing where the file has no tokenizer that is read, since the user may name another."""
    try:
        return {"tokenizer.json": make_tokenizer(path, metadata).to_str()}
    except ConfigError as error:
        logger.warning("%s", error)
        return {}


def _factors(path: Path, name: str, info: TensorInfo) -> bytes:
    if info.type != "F32" or len(info.shape) != 1:
        raise ConfigError(f"{path} is damaged: {name} is {info.type} of shape {list(info.shape)}. Download it again.")
    with path.open("rb") as file:
        file.seek(info.offset)
        return file.read(4 * info.shape[0])
