"""How files of images, videos and documents are read: the options of `media_io_kwargs`, by kind."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.core.errors import ConfigError


class _Option(NamedTuple):
    takes: Callable[[Any], bool]
    what: str  # it takes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_LARGEST = 2**31 - 1
_OPTIONS: Mapping[str, Mapping[str, _Option]] = {
    "image": {
        "rgba_background_color": _Option(
            lambda value: (
                isinstance(value, list | tuple) and len(value) == 3 and all(_is_whole(each, 0, 255) for each in value)
            ),
            "a list of three whole numbers from 0 to 255",
        )
    },
    "video": {
        "num_frames": _Option(
            lambda value: _is_whole(value, 1, _LARGEST) or _is_whole(value, -1, -1), "a whole number above 0, or -1"
        ),
        "fps": _Option(lambda value: _is_number(value) and (0 < value < 1e6 or value == -1), "a number above 0, or -1"),
    },
    "document": {
        "dpi": _Option(lambda value: _is_whole(value, 18, 600), "a whole number from 18 to 600"),
        "max_pages": _Option(lambda value: _is_whole(value, 1, _LARGEST), "a whole number above 0"),
    },
}  # fmt: skip


def check_io_options(given: Any) -> None:
    """Checks options by kind, such as `{"video": {"num_frames": 32}}`.

    Raises:
        ConfigError: an option that there is not, or a value that it does not take, by name.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"media_io_kwargs must be an object such as {_EXAMPLE}, got {type(given).__name__}.")
    for kind, options in given.items():
        known = _OPTIONS.get(kind)
        if known is None or not isinstance(options, Mapping):
            raise ConfigError(
                f"media_io_kwargs: {kind!r} has no options here; {', '.join(_OPTIONS)} have, as objects such as "
                f"{_EXAMPLE}."
            )
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"media_io_kwargs: {kind} has no {name!r}; it has {' and '.join(known)}.")
            if not known[name].takes(value):
                raise ConfigError(f"media_io_kwargs: {name} must be {known[name].what}, got {value!r}.")


_EXAMPLE = '{"video": {"num_frames": 32}}'
