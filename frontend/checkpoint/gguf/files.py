"""Finds the files of a model among GGUF files: one quantization of several, all parts of a split file."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.core.errors import ConfigError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_OTHERS = re.compile(r"(^|[-_.])(mmproj|imatrix|lora|mtp)([-_.]|$)", re.IGNORECASE)
"""What lies beside models under the same ending: encoders of pictures, statistics, adapters."""


def choose(names: Iterable[str], tag: str | None, where: str) -> list[str]:
    """Those of the files `names` that are the model: one, or all parts of it in order.

    Args:
        tag: the quantization that is asked for, such as Q4_K_M; None: there is only one.

    Raises:
        ConfigError: none, several, or not all parts; the message names what there is.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _OTHERS.search(Path(name).stem):
            part = _PART.fullmatch(name)
            models.setdefault(part[1] if part else name[: -len(".gguf")], []).append(name)
    wanted = [stem for stem in models if tag is None or _has_tag(stem, tag)]
    if len(wanted) != 1:
        found = ", ".join(map(_short, models)) or "none"
        fault = "no GGUF file" if not wanted else "several GGUF files"
        asked = f" for {tag!r}" if tag else ""
        raise ConfigError(f"{where} has {fault}{asked}: {found}. Name one as {where}:Q4_K_M, or by its path.")
    return _all_parts(models[wanted[0]], where)


def parts_of(path: Path) -> list[Path]:
    """The file `path` and, if it is one part of a split model, all others.

    Raises:
        ConfigError: a part is missing.
    """
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    pattern = re.compile(re.escape(part[1]) + rf"-\d{{5}}-of-{part[3]}\.gguf", re.IGNORECASE)
    names = [each.name for each in path.parent.iterdir() if pattern.fullmatch(each.name)]
    return [path.parent / name for name in _all_parts(names, str(path.parent))]


def _has_tag(stem: str, tag: str) -> bool:
    """Returns True if the name contains `tag` as a whole word: Q4_K is not Q4_K_M."""
    return re.search(rf"(^|[-.])({re.escape(tag)})([-.]|$)", Path(stem).name, re.IGNORECASE) is not None


def _short(stem: str) -> str:
    return Path(stem).name


def _all_parts(names: Sequence[str], where: str) -> list[str]:
    part = _PART.fullmatch(names[0])
    if part is None:
        return list(names)
    numbers, count = {int(each[2]) for name in names if (each := _PART.fullmatch(name))}, int(part[3])
    if lost := sorted({*range(1, count + 1)} ^ numbers):
        raise ConfigError(
            f"{where} has {len(names)} of the {count} parts of {_short(part[1])}: put all of them there "
            f"({'lacks' if lost[0] not in numbers else 'not'} part {lost[0]})."
        )
    return sorted(names)
