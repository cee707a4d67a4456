"""The layers of decoders: the places of a layer's norms, and the inputs of its two blocks."""

from torch import Tensor

from quire.executor.layers.norm import Norm
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import FeedForward, SelfAttention
from quire.ops.backend import Backend


class ResidualLayer:
    """Computes `x + after(attention(before(x)))`, then `x + after(mlp(before(x)))`. Any of the four norms may be
    missing.

    `multiplier` multiplies each block's output.
    """

    def __init__(
        self,
        ops: Backend,
        attention: SelfAttention,
        mlp: FeedForward,
        *,
        before_attention: Norm | None = None,
        after_attention: Norm | None = None,
        before_mlp: Norm | None = None,
        after_mlp: Norm | None = None,
        multiplier: float = 1.0,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.activation_size = attention.activation_size + mlp.activation_size
        self._ops = ops
        self._before_attention = before_attention
        self._after_attention = after_attention
        self._before_mlp = before_mlp
        self._after_mlp = after_mlp
        self._multiplier = multiplier

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self._enter(self._before_attention, x, residual)
        x = self._leave(self._after_attention, self.attention(x, step))
        x, residual = self._enter(self._before_mlp, x, self.attention.outputs_of(residual, step))
        return self._leave(self._after_mlp, self.mlp(x)), residual

    def _enter(self, norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if norm is not None:
            return norm.add(x, residual)
        total = x if residual is None else self._ops.add(x, residual)
        return total, total

    def _leave(self, norm: Norm | None, x: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self._multiplier == 1 else self._ops.scale(x, self._multiplier)


class ParallelLayer:
    """Computes `x + attention(norm(x)) + mlp(mlp_norm(x))`; without `mlp_norm`, both blocks read the same norm."""

    def __init__(
        self, ops: Backend, attention: SelfAttention, mlp: FeedForward, norm: Norm, mlp_norm: Norm | None = None
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self._ops = ops
        self._norm = norm
        self._mlp_norm = mlp_norm

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self._norm.add(x, residual)
        attended, residual = self.attention(x, step), self.attention.outputs_of(residual, step)
        x = self.attention.outputs_of(x, step) if self._mlp_norm is None else self._mlp_norm(residual)
        return self._ops.add(self.mlp(x), attended), residual


class PostNormLayer:
    """Computes `n = norm(x + attention(x))`, then `n + mlp(n)`, whose norm the next layer begins with."""

    def __init__(self, before: Norm | None, attention: SelfAttention, between: Norm, mlp: FeedForward) -> None:
        """Takes as `before` the norm of the layer's input: the previous layer's last norm, or the embedding's."""
        self.attention = attention
        self.mlp = mlp
        self._before = before
        self._between = between

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        if self._before is not None:
            x = self._before.add(x, residual)[0]
        x = self._between.add(self.attention(x, step), self.attention.outputs_of(x, step))[0]
        return self.mlp(x), x
