"""Operations of our backend as calls of a program, on values [1, num_tokens, size] or [num_tokens, size]."""

from dataclasses import dataclass

from torch import Tensor

from quire.ops.activations import PlainActivation
from quire.ops.backend import Backend
from quire.ops.recurrent import GateActivation


@dataclass(eq=False)
class Add:
    """Computes `x + residual`, both [..., size], perhaps in place of `residual`."""

    ops: Backend

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add(_rows(x), _rows(residual)).view(x.shape)


@dataclass(eq=False)
class AddNorm:
    """Computes `(norm(x + residual), x + residual)`, all [..., size], perhaps in place of `residual`."""

    ops: Backend
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = self.ops.add_rms_norm(_rows(x), _rows(residual), self.weight, self.eps)
        return normed.view(x.shape), total.view(x.shape)


@dataclass(eq=False)
class Scale:
    """Runs `Backend.scale` on [..., size], perhaps in place."""

    ops: Backend
    factor: float
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.scale(_rows(x), self.factor, self.softcap).view(x.shape)


@dataclass(eq=False)
class MultiplyGate:
    """Computes `x * activation(gate)` for gates [..., num_gates]; `x` may be [..., num_gates, n]."""

    ops: Backend
    activation: GateActivation

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        gates = _rows(gate)
        return self.ops.recurrent.multiply_gate(x.reshape(len(gates), -1), gates, self.activation).view(x.shape)


@dataclass(eq=False)
class ActivateAndMultiply:
    """Runs `Backend.activate_and_mul` on [..., 2 * size]."""

    ops: Backend
    activation: PlainActivation

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.activate_and_mul(_rows(x), self.activation).view(*x.shape[:-1], -1)


@dataclass(eq=False)
class Activate:
    """Runs `Backend.activate` on [..., size], perhaps in place."""

    ops: Backend
    activation: PlainActivation

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.activate(_rows(x), self.activation).view(x.shape)


@dataclass(eq=False)
class LayerNorm:
    """Runs `Backend.layer_norm` on [..., size]."""

    ops: Backend
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(_rows(x), self.weight, self.bias, self.eps).view(x.shape)


@dataclass(eq=False)
class TakeRows:
    """Looks up rows of a table: indices [1, num_tokens] → [1, num_tokens, size]."""

    ops: Backend
    rows: Tensor

    def __call__(self, index: Tensor) -> Tensor:
        return self.ops.take_rows(self.rows, index[0]).unsqueeze(0)


def _rows(x: Tensor) -> Tensor:
    """Reshapes [..., size] to [num_tokens, size]."""
    return x.reshape(-1, x.shape[-1])
