"""Activation functions inside kernels, in float32; the formulas of `quire.ops.activations.Activation`."""

import triton
import triton.language as tl

from quire.ops.activations import SILU_LIMIT, SWIGLU_ALPHA, SWIGLU_LIMIT

_SWIGLU_ALPHA = tl.constexpr(SWIGLU_ALPHA)
_SWIGLU_LIMIT = tl.constexpr(SWIGLU_LIMIT)
_SILU_LIMIT = tl.constexpr(SILU_LIMIT)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """A plain activation of `x`, float32."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 is sigmoid(2 * y)
        return x * tl.sigmoid((x + 0.044715 * x * x * x) * _SQRT_8_OVER_PI)
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive if ACTIVATION == "relu2" else positive


@triton.jit
def activate_and_mul(gate, up, ACTIVATION: tl.constexpr):
    """The output of a gated layer, for a `gate` and its `up`, float32."""
    if ACTIVATION == "clamped_swiglu":
        gate = _at_most(gate, _SWIGLU_LIMIT)
        return gate * tl.sigmoid(gate * _SWIGLU_ALPHA) * (_within(up, _SWIGLU_LIMIT) + 1)
    elif ACTIVATION == "clamped_silu":
        return activate(_at_most(gate, _SILU_LIMIT), "silu") * _within(up, _SILU_LIMIT)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def _at_most(x, limit):
    return tl.where(x > limit, limit, x)  # NaN stays


@triton.jit
def _within(x, limit):
    return tl.where(x < -limit, -limit, _at_most(x, limit))


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` of float32, also where it is small."""
    above = tl.exp(-tl.abs(x))
    whole = 1.0 + above
    is_lost = whole == 1.0  # all of `above`, which then is the logarithm
    log = tl.where(is_lost, above, tl.log(whole) * (above / tl.where(is_lost, 1.0, whole - 1.0)))
    return tl.maximum(x, 0.0) + log
