"""Videos that a program gives as frames."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.core.errors import ParameterError
from quire.frontend.media.messages import Frames

if TYPE_CHECKING:
    import numpy as np

_METADATA = ("total_num_frames", "fps", "duration", "video_backend", "frames_indices", "do_sample_frames")


def is_video(value: Any) -> bool:
    """Returns True for one video: a file, an array of frames, frames with their metadata, or a list of frames."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return True
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_frame(each) for each in value)
    return value is not None and getattr(value, "ndim", 4) == 4


def frames_of(value: Any, param: str) -> tuple[bytes, None, None, Frames]:
    """The frames of an array [num_frames, height, width, 3] of bytes, of a list of images, or of either in a pair with
    vLLM's metadata: their bytes and, as the last, their form.

    Raises:
        ParameterError: the value has another form.
    """
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    frames = _array(value, param)
    count, height, width, _ = frames.shape
    form = _described((count, height, width), metadata, param)
    return frames.tobytes(), None, None, form


def _described(shape: tuple[int, int, int], metadata: Mapping[str, Any], param: str) -> Frames:
    if unknown := sorted(set(metadata) - {*_METADATA}):
        raise ParameterError(f"{param} has metadata {unknown[0]!r}; it may have {', '.join(_METADATA)}.", param=param)
    if metadata.get("do_sample_frames"):
        raise ParameterError(
            f"{param}: frames are taken as they are given; choose them before, and leave do_sample_frames out.",
            param=param,
        )
    fps, total, indices = (metadata.get(name) for name in ("fps", "total_num_frames", "frames_indices"))
    if fps is not None and not (isinstance(fps, int | float) and math.isfinite(fps) and fps > 0):
        raise ParameterError(f"{param}: fps must be a number above 0, got {fps!r}.", param=param)
    if total is not None and not (isinstance(total, int) and total > 0):
        raise ParameterError(f"{param}: total_num_frames must be a whole number above 0, got {total!r}.", param=param)
    if indices is not None:
        indices = [int(each) for each in indices]
        if len(indices) != shape[0]:
            raise ParameterError(
                f"{param}: frames_indices has {len(indices)} numbers for {shape[0]} frames.", param=param
            )
    return Frames(shape, fps, indices, total)


def _array(value: Any, param: str) -> "np.ndarray":
    import numpy as np  # imported here, because most servers do without

    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu().numpy()
    if isinstance(value, list | tuple):
        frames = [np.asarray(each.convert("RGB") if hasattr(each, "convert") else each) for each in value]
        if len({frame.shape for frame in frames}) > 1:
            raise ParameterError(f"{param} has frames of different sizes.", param=param)
        value = np.stack(frames) if frames else np.empty(0, np.uint8)
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or not array.size:
        raise ParameterError(
            f"{param} must be frames as an array [num_frames, height, width, 3] of uint8, a list of images, or the "
            f"bytes of a file, got an array of {array.dtype} with the shape {list(array.shape)}.",
            param=param,
        )
    return np.ascontiguousarray(array)


def _is_frame(value: Any) -> bool:
    return hasattr(value, "convert") or getattr(value, "ndim", 0) == 3
