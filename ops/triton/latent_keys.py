"""What the kernels of latent attention share: queries, and tiles of keys, which all heads read.

A key is a latent, which is the value as well, and a rotated part.
"""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import scaled_values, softmax_step
from quire.ops.triton.kv_rows import load_rows, scales_behind


@triton.jit
def load_queries(
    q_ptr,
    q_rotated_ptr,
    places,
    rows,
    is_query,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The queries [M, BLOCK_R] at `places` [M], and their rotated parts [M, BLOCK_P], which are dense `rows` [M]."""
    latent, rotated = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    q = tl.load(q_ptr + places[:, None] + latent[None, :], mask=is_query[:, None] & (latent < RANK)[None, :], other=0.0)
    q_rotated = tl.load(
        q_rotated_ptr + rows[:, None] * ROTARY_DIM + rotated[None, :],
        mask=is_query[:, None] & (rotated < ROTARY_DIM)[None, :],
        other=0.0,
    )
    return q, q_rotated


@triton.jit
def add_latents(
    most,
    total,
    acc,
    q,
    q_rotated,
    cache_ptr,
    places,
    is_key,
    is_seen,
    scale,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROTATED_AT: tl.constexpr,
    KIND: tl.constexpr,
):
    """Adds the keys at `places` [N] to the running maximum, sum and weighted latents of the queries.

    Keys that are no `is_key` [N] are not read; queries see those that `is_seen` [M or 1, N] says.
    """
    rotated_places = places + ROTATED_AT
    latents, scales = load_rows(
        cache_ptr, places, scales_behind(places, RANK, KIND), is_key, RANK, BLOCK_R, KIND, q.dtype
    )  # fmt: skip
    k, k_scales = load_rows(
        cache_ptr, rotated_places, scales_behind(rotated_places, ROTARY_DIM, KIND), is_key,
        ROTARY_DIM, BLOCK_P, KIND, q.dtype,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
    rotated_scores = tl.dot(q_rotated, tl.trans(k), input_precision="ieee")
    if KIND != "plain":
        scores *= scales[None, :]
        rotated_scores *= k_scales[None, :]
    scores = tl.where(is_seen, (scores + rotated_scores) * scale, float("-inf"))
    values = scaled_values(latents, scales, KIND)
    return softmax_step(scores, most, total, acc, values, scales, KIND)
