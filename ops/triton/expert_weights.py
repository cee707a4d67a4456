"""Tiles of experts' weights inside kernels: plain ones as they are, codes dequantized."""

import triton
import triton.language as tl


@triton.jit
def load_weights(
    weight_ptr, table_ptr, rows, row_stride, first, inputs, known, IS_EVEN: tl.constexpr, BLOCK_IN: tl.constexpr
):  # fmt: skip
    """Loads weights or codes [rows, BLOCK_IN] of the inputs from `first` on, zeros past `known`.

    With `table_ptr`, a byte has two codes, which stand for its values; else each element is its own value.
    """
    if table_ptr is not None:
        pairs = tl.arange(0, BLOCK_IN // 2)
        places = weight_ptr + rows[:, None] * row_stride + first // 2 + pairs[None, :]
        if IS_EVEN:
            codes = tl.load(places)
        else:
            codes = tl.load(places, mask=(2 * pairs < known)[None, :], other=0)
        low, high = tl.load(table_ptr + (codes & 15)), tl.load(table_ptr + (codes >> 4))
        return tl.reshape(tl.join(low, high), (low.shape[0], BLOCK_IN))
    else:
        places = weight_ptr + rows[:, None] * row_stride + first + inputs[None, :]
        if IS_EVEN:
            return tl.load(places)
        return tl.load(places, mask=(inputs < known)[None, :], other=0.0)


@triton.jit
def scale_weights(
    values, scales_ptr, offsets_ptr, first_group, rows, first, inputs, known, num_groups, group_size,
    SPAN: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Multiplies `values` [rows, BLOCK_IN] by their groups' scales, and adds their offsets, in float32.

    `SPAN` inputs of this block that follow one another share a scale; 0: the groups' ends may be anywhere.
    """
    values = values.to(tl.float32)
    if SPAN == 0:
        groups = first_group + rows[:, None] * num_groups + ((first + inputs) // group_size)[None, :]
        in_range = (inputs < known)[None, :]
        values *= tl.load(scales_ptr + groups, mask=in_range, other=0.0).to(tl.float32)
        if offsets_ptr is not None:
            values += tl.load(offsets_ptr + groups, mask=in_range, other=0.0).to(tl.float32)
        return values
    elif SPAN == BLOCK_IN:
        groups = first_group + rows * num_groups + first // group_size
        values *= tl.load(scales_ptr + groups).to(tl.float32)[:, None]
        if offsets_ptr is not None:
            values += tl.load(offsets_ptr + groups).to(tl.float32)[:, None]
        return values
    else:
        parts = tl.arange(0, BLOCK_IN // SPAN)
        groups = first_group + rows[:, None] * num_groups + first // SPAN + parts[None, :]
        in_range = (parts * SPAN < known)[None, :]
        values = tl.reshape(values, (values.shape[0], BLOCK_IN // SPAN, SPAN))
        values *= tl.load(scales_ptr + groups, mask=in_range, other=0.0).to(tl.float32)[:, :, None]
        if offsets_ptr is not None:
            values += tl.load(offsets_ptr + groups, mask=in_range, other=0.0).to(tl.float32)[:, :, None]
        return tl.reshape(values, (values.shape[0], BLOCK_IN))
