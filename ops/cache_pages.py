"""Pages of a quantized cache of heads: where the scales of a page's rows lie.

For keys and for values, a page has [num_kv_heads, block_size, row_size] bytes, with rows of `quire.ops.cache_rows`. A
backend chooses how the rows of a head lie in theirs. A cache that is not quantized has rows alone.
"""

import torch
from torch import Tensor

from quire.ops.cache_rows import SCALE_BYTES


class ScaledRows:
    """Each row is one piece of memory: its scale follows its codes.

    `heads` are a cache's keys or values [num_pages, num_kv_heads, block_size, row_size], a view; as uint8 if they are
    quantized. `rows` are [n, num_kv_heads, row_size] of these, in the slots at `offsets` [n] of `pages` [n].
    """

    def write(self, heads: Tensor, pages: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """Stores `rows`."""
        heads[pages, :, offsets] = rows

    def read(self, heads: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
        """Returns `rows`."""
        return heads[pages, :, offsets]

    def rows(self, heads: Tensor) -> Tensor:
        """Returns the rows of whole heads [..., block_size, row_size], which may lie in other memory."""
        return heads


class ScalePlanes(ScaledRows):
    """A head's scales follow the codes of all its rows in the page.

    So codes begin where wide loads do, and a page's scales are one load.
    """

    def write(self, heads: Tensor, pages: Tensor, offsets: Tensor, rows: Tensor) -> None:
        if heads.dtype != torch.uint8:
            return super().write(heads, pages, offsets, rows)
        codes, scales = planes(heads)
        codes[pages, :, offsets], scales[pages, :, offsets] = rows.tensor_split((codes.shape[-1],), dim=-1)
        return None

    def read(self, heads: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
        if heads.dtype != torch.uint8:
            return super().read(heads, pages, offsets)
        return torch.cat([plane[pages, :, offsets] for plane in planes(heads)], dim=-1)

    def rows(self, heads: Tensor) -> Tensor:
        return heads if heads.dtype != torch.uint8 else torch.cat(planes(heads), dim=-1)


def planes(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Views of quantized heads [..., block_size, row_size] uint8 that `ScalePlanes` has laid out.

    They are the codes [..., block_size, row_size - SCALE_BYTES] and the scales [..., block_size, SCALE_BYTES].
    """
    block_size, row = heads.shape[-2:]
    memory = heads.view(*heads.shape[:-2], block_size * row)
    codes, scales = memory.tensor_split((block_size * (row - SCALE_BYTES),), dim=-1)
    return codes.unflatten(-1, (block_size, row - SCALE_BYTES)), scales.unflatten(-1, (block_size, SCALE_BYTES))
