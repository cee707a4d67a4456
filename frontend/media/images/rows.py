"""Reads what a tower has made of an image elsewhere, in place of the image."""

import io
import math
from typing import Any

import torch

from quire.core.wire.media import GIVEN_ROWS
from quire.frontend.media.errors import MediaError
from quire.frontend.media.library_processor import LibraryProcessor, Mark, ready_item
from quire.frontend.media.messages import ReadRows, ReadyItem

_GRID = "image_grid_thw"
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class RowsReader:
    """Reads rows for one model.

    Args:
        library: its processor.
        mark: what stands for an image.
        tried: an image as the processor has it, which shows what text stands around the tokens of rows.
    """

    def __init__(self, library: LibraryProcessor, mark: Mark, tried: ReadyItem) -> None:
        text_config: Any = library.config.get_text_config()
        vision_config = getattr(library.config, "vision_config", None)
        self._hidden_size: int = text_config.hidden_size
        self._num_layers = len(getattr(vision_config, "deepstack_visual_indexes", None) or ())
        self._has_layer_inputs = bool(getattr(text_config, "hidden_size_per_layer_input", 0))
        self._has_grid = _GRID in tried.facts
        self._merge = int(getattr(library.processor.image_processor, "merge_size", 1))
        self._row: str = library.processor.tokenizer.convert_ids_to_tokens(mark.token_id)
        before, rows, after = tried.text.partition(self._row * tried.num_rows)
        self._around = (before, after) if rows else None

    def read(self, question: ReadRows) -> ReadyItem:
        """The rows as an item of a prompt. Raises MediaError."""
        if self._around is None or self._has_layer_inputs:
            raise MediaError("has rows of a tower, but a prompt of this model has more of an image; send the image")
        rows = _load(question.data)
        widths = sorted({self._hidden_size, (1 + self._num_layers) * self._hidden_size})[-1]
        if rows.dtype not in _TYPES or rows.ndim != 2 or not len(rows) or rows.shape[1] != widths:
            raise MediaError(
                f"is of type {rows.dtype} with the shape {list(rows.shape)}; this model takes floats [number of rows, "
                f"{widths}]"
            )
        if not rows.isfinite().all():
            raise MediaError("holds NaN or infinity")
        values = {GIVEN_ROWS: rows.to(torch.float32).numpy()}
        if self._has_grid:
            values[_GRID] = self._grid(question.grid, len(rows)).numpy()
        elif question.grid:
            raise MediaError(f"has {_GRID}, which this model does not read")
        before, after = self._around
        return ready_item("image", before + self._row * len(rows) + after, len(rows), values)

    def _grid(self, data: bytes, num_rows: int) -> torch.Tensor:
        """[1, 3] int64: time, height and width, in patches."""
        if not data:
            raise MediaError(f"needs {_GRID}, by which this model tells the places of rows")
        grid = _load(data)
        if grid.is_floating_point() or grid.is_complex() or grid.numel() != 3 or bool((grid < 1).any()):
            raise MediaError(f"has {_GRID} that is not three whole numbers from 1")
        sizes = [int(size) for size in grid.flatten().tolist()]
        if any(size % self._merge for size in sizes[1:]):
            raise MediaError(f"has {_GRID} whose height or width is no multiple of {self._merge} patches")
        if math.prod(sizes) != num_rows * self._merge**2:
            raise MediaError(f"has {num_rows} rows, and {_GRID} says {math.prod(sizes) // self._merge**2}")
        return grid.reshape(1, 3).to(torch.int64)


def _load(data: bytes) -> torch.Tensor:
    """Reads a tensor, and nothing that runs code. Raises MediaError."""
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # what is no such file may be anything
        message = " ".join(str(error).split())[:120]
        raise MediaError(f"is no tensor as torch.save writes it ({type(error).__name__}: {message})") from None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        raise MediaError("is no plain tensor")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise MediaError("repeats its numbers by strides; save a copy of it")
    return value.detach()
