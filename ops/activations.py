"""Activation functions, by the names that all backends know."""

from typing import Literal

PlainActivation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu"]
"""An elementwise activation function: silu (arXiv:1702.03118), gelu (1606.08415), its approximations by tanh and by `x
* sigmoid(1.702 * x)`, relu and its square (2109.08668).
"""

Activation = PlainActivation | Literal["clamped_swiglu", "clamped_silu"]
"""The output of a gated layer for a gate g and its up u.

f(g) * u with a plain activation f; or g * sigmoid(SWIGLU_ALPHA * g) * (u + 1) with g and u at most SWIGLU_LIMIT, and u
at least its negative (arXiv:2508.10925); or silu(g) * u with the same limits by SILU_LIMIT.
"""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
SILU_LIMIT = 10.0
