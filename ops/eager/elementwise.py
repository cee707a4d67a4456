"""Norms, rotation and activation in plain torch. Shapes and formulas are those of `quire.ops.Backend`."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`; the mean in float32, the product with `weight` in `x`'s dtype."""
    full = x.float()
    # vector_norm is one pass over x; the rest works on one number a row.
    inverse = torch.linalg.vector_norm(full, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (full * inverse).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rotation(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles in float32; `cos` holds each twice, `sin` negated and as it is."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + swapped(x) * sin`, where `swapped` exchanges the halves of the first `rotary_dim` dimensions."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotary(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    swapped = torch.cat((x[..., size // 2 :], x[..., : size // 2]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of `x` = [gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`."""
    return F.embedding(index, x)
