"""Finds the files of a checkpoint's weights in its folder."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire.core import checkpoint_file
from quire.core.config.load import ADAPTERS, BESIDE_WEIGHTS
from quire.core.errors import ModelLoadError
from quire.core.wire import gguf_table

FileFormat = Literal["auto", "safetensors", "pt", "npcache", "mistral", "bitsandbytes", "gguf"]


@dataclass(frozen=True)
class WeightFiles:
    """The files of one checkpoint. If two have a tensor of the same name, the later file wins.

    Attributes:
        index: the index, if there is one.
        listed: the file of each tensor, as the index says. The index chooses the files; their own headers decide.
        has_mistral_names: tensors are named and ordered as in Mistral's own releases.
        is_gguf: the one file is the table of a GGUF model's tensors, which may lie elsewhere.
    """

    paths: list[Path]
    index: Path | None = None
    listed: dict[str, Path] = field(default_factory=dict)
    has_mistral_names: bool = False
    is_gguf: bool = False


@dataclass(frozen=True)
class _FileNaming:
    """A naming of weight files in a folder: one file, else the files of an index, else all files of a pattern."""

    index: str
    single: str
    patterns: tuple[str, ...]
    without: str = "\0"  # beginning of the names that belong to another naming


_SAFETENSORS = _FileNaming("model.safetensors.index.json", "model.safetensors", ("*.safetensors",), "consolidated")
_TORCH = _FileNaming("pytorch_model.bin.index.json", "pytorch_model.bin", ("*.bin", "*.pt", "*.pth"), "consolidated")
_MISTRAL = _FileNaming(
    "consolidated.safetensors.index.json", "consolidated.safetensors", ("consolidated*.safetensors",)
)

_GGUF = _FileNaming("\0", gguf_table.FILE_NAME, ())

_NAMINGS: dict[FileFormat, tuple[_FileNaming, ...]] = {
    "auto": (_GGUF, _SAFETENSORS, _TORCH, _MISTRAL),
    "bitsandbytes": (_SAFETENSORS, _TORCH),
    "safetensors": (_SAFETENSORS,),
    "pt": (_TORCH,),
    "npcache": (_TORCH,),
    "mistral": (_MISTRAL,),
    "gguf": (_GGUF,),
}


def find_files(folder: Path, load_format: FileFormat) -> WeightFiles:
    """Finds the files in `folder` that hold the weights, chosen as Transformers chooses them.

    `auto` takes safetensors before pickled weights, and files under their usual names before files of any name. A
    folder with a GGUF model's table has no other weights.

    Raises:
        ModelLoadError: no file of this format, or an index that cannot be used.
    """
    namings = _NAMINGS[load_format]
    found = _first(_find_named, folder, namings) or _first(_find_any, folder, namings)
    if found is None:
        raise ModelLoadError(_nothing_found(folder, load_format))
    return found


def _first(
    find: Callable[[Path, _FileNaming], WeightFiles | None], folder: Path, namings: Iterable[_FileNaming]
) -> WeightFiles | None:
    return next((found for naming in namings if (found := find(folder, naming)) is not None), None)


def _find_named(folder: Path, naming: _FileNaming) -> WeightFiles | None:
    """Finds the file or the index with the naming's usual name. A whole file wins over an index next to it."""
    is_mistral = naming is _MISTRAL
    if (folder / naming.single).is_file():
        return WeightFiles(
            [folder / naming.single], has_mistral_names=is_mistral, is_gguf=naming is _GGUF
        )  # fmt: skip
    index = folder / naming.index
    if index.is_file():
        listed = _read_index(index)
        return WeightFiles(sorted(set(listed.values())), index, listed, is_mistral)
    return None


def _find_any(folder: Path, naming: _FileNaming) -> WeightFiles | None:
    paths = [path for pattern in naming.patterns for path in sorted(folder.glob(pattern))]
    paths = [path for path in paths if not path.name.startswith((*BESIDE_WEIGHTS, naming.without))]
    return WeightFiles(paths, has_mistral_names=naming is _MISTRAL) if paths else None


def _nothing_found(folder: Path, load_format: FileFormat) -> str:
    patterns = [pattern for naming in _NAMINGS[load_format] for pattern in naming.patterns]
    text = f"{folder} holds no weights ({', '.join(patterns)})"
    everywhere = list(dict.fromkeys(naming for namings in _NAMINGS.values() for naming in namings))
    if _first(_find_named, folder, everywhere) or _first(_find_any, folder, everywhere):
        return f"{text}, but others: drop --load-format {load_format}."
    if adapters := [path.name for pattern in ADAPTERS for path in sorted(folder.glob(pattern))]:
        return f"{text}, only an adapter ({adapters[0]}): merge it into its base model, and serve the result."
    if gguf := sorted(path.name for path in folder.glob("*.gguf")):
        return f"{text}, only {gguf[0]}: drop --load-format, or serve that file by its path."
    return f"{text}; load_format=dummy runs on random ones."


def _read_index(path: Path) -> dict[str, Path]:
    """Reads the file of each tensor."""
    content = checkpoint_file.read_json(path)
    try:
        weight_map: dict[str, str] = content["weight_map"]
        places = {name: path.parent / name for name in weight_map.values()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not an index of weights: {error!r}. Download it again.") from None
    for name in places:
        checkpoint_file.check_inside(path.parent, name, path)
    missing = sorted({file.name for file in places.values() if not os.path.isfile(file)})
    if missing:
        raise ModelLoadError(
            f"{path} names {', '.join(missing[:3])}, which {path.parent} lacks. Finish the download; or remove the "
            "index, if it is not that of the files there."
        )
    return {tensor: places[name] for tensor, name in weight_map.items()}
