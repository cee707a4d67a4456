"""What decode and prompt attention share: the keys that a token sees, and the steps of the softmax.

Scores are multiplied by log2(e), so that `exp2` makes weights of them. `CHUNKS` is `AttentionForm.chunks`, or "none".
"""

import triton
import triton.language as tl

from quire.ops.triton.kv_rows import head_begin, row_places

LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def visible_range(position, prefix_begin, prefix_end, window, span_window, chunk, CHUNKS: tl.constexpr):
    """The first key that a token at `position` sees, and the one after the last, as `AttentionForm` says.

    The tokens from `prefix_begin` up to `prefix_end` see each other; without a prefix span both are 0.
    """
    first = tl.maximum(position + 1 - window, 0)
    end = position + 1
    if CHUNKS == "none":
        is_inside = (prefix_begin <= position) & (position < prefix_end)
        first_of_span = tl.maximum(prefix_begin, position + 1 - span_window)
        first = tl.where(is_inside, tl.minimum(first, first_of_span), first)
        end = tl.where(is_inside, tl.minimum(prefix_end, position + span_window), end)
    else:
        start = position - position % chunk
        if CHUNKS == "own":
            first = tl.maximum(first, start)
        elif CHUNKS == "previous":
            first = tl.maximum(first, start - chunk)
            end = start
        else:
            end = start - chunk
    return first, end


@triton.jit
def key_places(
    table_ptr, keys, in_range, head, page_stride, page_shift, ROW: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Places of a KV head's keys and their scales, in pages of `1 << page_shift`; those not `in_range` are any."""
    pages = tl.load(table_ptr + (keys >> page_shift), mask=in_range, other=0).to(tl.int64)
    begins = pages * page_stride + head_begin(head, page_shift, ROW, KIND)
    return row_places(begins, keys & ((1 << page_shift) - 1), page_shift, ROW, KIND)


@triton.jit
def score_tile(
    q,
    k,
    k_scales,
    distances,
    heads,
    slopes,
    bias_ptr,
    scale,
    softcap,
    reach,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Scores [M, N] of `q` [M, D] and `k` [N, D].

    `scale` has the factor log2(e), or is `2 * log2(e) * scale / softcap`. `distances` [M, N] are each key's position
    less the query's; `heads` and `slopes` are [M].
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if KIND != "plain":
        scores *= k_scales[None, :]
    if HAS_SOFTCAP:  # tanh(x) is 1 - 2 / (exp(2 * x) + 1)
        scores = (softcap * _LOG2_E) * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
    else:
        scores *= scale
    if HAS_SLOPES:
        scores += (slopes * _LOG2_E)[:, None] * distances.to(tl.float32)
    if bias_ptr is not None:
        places = heads[:, None] * (2 * reach + 1) + tl.minimum(tl.maximum(distances, -reach), reach) + reach
        scores += tl.load(bias_ptr + places) * _LOG2_E
    return scores


@triton.jit
def softmax_step(scores, most, total, acc, v, v_scales, KIND: tl.constexpr):
    """Adds the keys of a tile to the running maximum [M], sum [M] and weighted values [M, D]."""
    new_most = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(new_most == float("-inf"), 0.0, new_most)  # for a token that has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, axis=1)
    if KIND != "plain" and v.dtype != tl.float16:
        weights *= v_scales[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_most, total, acc


@triton.jit
def scaled_values(v, v_scales, KIND: tl.constexpr):
    """The values whose products with weights are left to `softmax_step`.

    In float16, a weight times the scale would lose bits, so values are scaled, not weights.
    """
    if KIND != "plain" and v.dtype == tl.float16:
        numbers = v.to(tl.float32) * v_scales[:, None]
        v = tl.minimum(tl.maximum(numbers, -65504.0), 65504.0).to(tl.float16)
    return v


@triton.jit
def merge_parts(most, total, acc, other_most, other_total, other_acc):
    """Merges two parts of a softmax. The products and sums are those of the source, so equal inputs give equal bits."""
    new_most = tl.maximum(most, other_most)
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    first, second = tl.exp2(most - base), tl.exp2(other_most - base)
    total = tl.fma(total, first, other_total * second)
    shape: tl.constexpr = acc.shape
    acc = tl.fma(acc, tl.broadcast_to(first[:, None], shape), other_acc * second[:, None])
    return new_most, total, acc


@triton.jit
def finish(most, total, acc, sinks):
    """The outputs [M, D], and the logarithms of the denominators [M], of which those without keys are -inf.

    `sinks` [M] are one more score of each row, -inf for none.
    """
    new_most = tl.maximum(most, sinks * _LOG2_E)
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.exp2(sinks * _LOG2_E - base)
    inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    lse = tl.where(total > 0.0, (base + tl.log2(tl.where(total > 0.0, total, 1.0))) * _LN_2, float("-inf"))
    return acc * (shrink * inverse)[:, None], lse
