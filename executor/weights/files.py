"""Finds the files of a checkpoint's weights in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.core.errors import ModelLoadError
from quire.core.wire import gguf_table

FileFormat = Literal["auto", "safetensors", "pt", "npcache", "mistral", "bitsandbytes", "gguf"]

_BESIDE_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")
"""What a trainer saves beside a model, under names that weights could have."""


@dataclass(frozen=True)
class WeightFiles:
    """The files of one checkpoint.

    Attributes:
        names: tensors that the index says each file holds; None: whatever is in the file.
        index: the index, if there is one.
        has_mistral_names: tensors are named and ordered as in Mistral's own releases.
        is_gguf: the one file is the table of a GGUF model's tensors, wherever these are.
    """

    names: dict[Path, list[str] | None]
    index: Path | None = None
    has_mistral_names: bool = False
    is_gguf: bool = False


@dataclass(frozen=True)
class _Layout:
    """A way to lay out weights in a folder: an index, else one file, else all files of a pattern."""

    index: str
    single: str
    patterns: tuple[str, ...]
    without: str = "\0"  # beginning of the names that belong to another layout


_SAFETENSORS = _Layout("model.safetensors.index.json", "model.safetensors", ("*.safetensors",), "consolidated")
_TORCH = _Layout("pytorch_model.bin.index.json", "pytorch_model.bin", ("*.bin", "*.pt", "*.pth"), "consolidated")
_MISTRAL = _Layout("consolidated.safetensors.index.json", "consolidated.safetensors", ("consolidated*.safetensors",))

_GGUF = _Layout("\0", gguf_table.FILE_NAME, ())

_LAYOUTS: dict[FileFormat, tuple[_Layout, ...]] = {
    "auto": (_GGUF, _SAFETENSORS, _TORCH, _MISTRAL),
    "bitsandbytes": (_SAFETENSORS, _TORCH),
    "safetensors": (_SAFETENSORS,),
    "pt": (_TORCH,),
    "npcache": (_TORCH,),
    "mistral": (_MISTRAL,),
    "gguf": (_GGUF,),
}


def find_files(folder: Path, load_format: FileFormat) -> WeightFiles:
    """The files in `folder` that hold the weights. `auto` takes safetensors if there are any, else pickled weights,
    except in a folder that stands for a GGUF model.

    Raises:
        ModelLoadError: no file of this format, or an index that cannot be used.
    """
    for layout in _LAYOUTS[load_format]:
        found = _find(folder, layout)
        if found is not None:
            return found
    raise ModelLoadError(_nothing_found(folder, load_format))


def _find(folder: Path, layout: _Layout) -> WeightFiles | None:
    is_mistral = layout is _MISTRAL
    if (folder / layout.index).is_file():
        return WeightFiles(_read_index(folder / layout.index), folder / layout.index, is_mistral)
    if (folder / layout.single).is_file():
        return WeightFiles({folder / layout.single: None}, None, is_mistral, layout is _GGUF)
    paths = [path for pattern in layout.patterns for path in sorted(folder.glob(pattern))]
    paths = [path for path in paths if not path.name.startswith((*_BESIDE_WEIGHTS, layout.without))]
    return WeightFiles(dict.fromkeys(paths), has_mistral_names=is_mistral) if paths else None


def _nothing_found(folder: Path, load_format: FileFormat) -> str:
    patterns = [pattern for layout in _LAYOUTS[load_format] for pattern in layout.patterns]
    text = f"{folder} holds no weights ({', '.join(patterns)})"
    other = next((name for name, layouts in _LAYOUTS.items() if any(_find(folder, each) for each in layouts)), None)
    if other is not None:
        return f"{text}, but others: drop --load-format {load_format}."
    if gguf := sorted(path.name for path in folder.glob("*.gguf")):
        return f"{text}, only {gguf[0]}: drop --load-format, or serve that file by its path."
    return f"{text}; load_format=dummy runs on random ones."


def _read_index(path: Path) -> dict[Path, list[str] | None]:
    by_file: dict[Path, list[str]] = {}
    try:
        weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        for name, file_name in weight_map.items():
            by_file.setdefault(path.parent / file_name, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not an index of weights: {error!r}. Download it again.") from None
    missing = sorted(file.name for file in by_file if not file.is_file())
    if missing:
        raise ModelLoadError(f"{path} names {', '.join(missing[:3])}, which {path.parent} lacks. Finish the download.")
    return dict(by_file)
