"""Attention of towers as one module: a projection, a rotation by places in the image, sequences, and an output."""

import copy
import inspect
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.models.transformers.layer_modules import LayerModule
from quire.executor.models.transformers.probe import sizes_of
from quire.executor.models.transformers.tower_attention import LENGTHS, TowerAttention
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.backend import AttentionForm

_X, _ENDS, _ROTATION = "hidden_states", "cu_seqlens", "position_embeddings"
_NAME = "quire-trial-flash"
_TOLERANCE = 1e-5
_SIZE = 4
"""The size of a head in a trial."""
_numbers = itertools.count()


class BlockForm(NamedTuple):
    """Attention whose `project` makes queries, keys and values, head by head, and whose `output` follows it."""

    project: str
    output: str
    num_heads: int
    scale: float


def read_block(module: Any, order: list[str]) -> BlockForm | None:
    """Returns the form of an attention module; None for another one.

    Args:
        order: the names of its two linear layers in the order of their calls.
    """
    names = inspect.signature(module.forward).parameters
    num_heads = getattr(module, "num_heads", None)
    if not {_X, _ENDS, _ROTATION} <= names.keys() or len(order) != 2 or not isinstance(num_heads, int):
        return None
    project, output = order
    width, inner = 8, num_heads * _SIZE
    small = copy.copy(module)
    small.__dict__ = dict(module.__dict__)
    own = {project: nn.Linear(width, 3 * inner), output: nn.Linear(inner, width)}
    for index, layer in enumerate(own.values()):
        layer.weight.data = _wave(*layer.weight.shape, start=index)
        layer.bias.data = _wave(len(layer.bias), start=index + 5)
    small._modules = {**module._modules, **own}
    trial = _Trial()
    small.config = copy.copy(module.config)
    name = f"{_NAME}-{next(_numbers)}"
    AttentionInterface.register(name, trial)
    small.config._attn_implementation_internal = name
    x, ends = _wave(5, width), torch.tensor([0, 2, 5], dtype=torch.int32)
    angles = _wave(5, _SIZE // 2, start=3).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        with torch.inference_mode():
            got = small(x, cu_seqlens=ends, position_embeddings=(cos, sin))
    except Exception:  # the code of another kind of module may raise anything
        return None
    finally:
        AttentionInterface._global_mapping.pop(name)
    with torch.inference_mode():
        q, k, v = own[project](x).view(5, 3, num_heads, _SIZE).unbind(1)
        heads = (_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        expected = own[output](trial.answer.flatten(1)) if trial.answer is not None else None
    is_alike = (
        isinstance(got, Tensor)
        and expected is not None
        and torch.equal(trial.ends, ends)
        and got.shape == expected.shape
        and all(
            a.shape == b.shape and torch.allclose(a, b, _TOLERANCE, _TOLERANCE)
            for a, b in zip((*trial.heads, got), (*heads, expected), strict=True)
        )
    )
    return BlockForm(project, output, num_heads, trial.scale) if is_alike else None


class _Trial:
    """Notes one call of attention, and answers with noise."""

    def __init__(self) -> None:
        self.heads: tuple[Tensor, ...] = ()
        self.answer: Tensor | None = None
        self.ends = torch.empty(0)
        self.scale = 0.0

    def __call__(self, _: nn.Module, *heads: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        """Takes queries, keys and values [1, heads, num_tokens, size]."""
        self.heads = tuple(x[0].transpose(0, 1) for x in heads[:3])
        self.ends, self.scale = arguments[LENGTHS], float(arguments["scaling"])
        self.answer = _wave(*self.heads[2].shape, start=7)
        return self.answer.unsqueeze(0), None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def _wave(*shape: int, start: int = 0) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.arange(start, start + count).mul(0.37).sin().view(shape)


class TowerBlock(LayerModule):
    """Attention of a `BlockForm` in the place of the class's module. Ranks divide the heads, if they can."""

    def __init__(
        self, context: ModelContext, attention: TowerAttention, name: str, module: Any, form: BlockForm
    ) -> None:
        super().__init__()
        project, output = (module.get_submodule(each) for each in (form.project, form.output))
        hidden, num_all = sizes_of(project)
        size = num_all // 3
        own = context.shard(0, size, "sizes of a tower's heads")
        parts = [
            LinearPart(f"{name}.{form.project}", num_all, Shard(0, start + own.start, start + own.stop))
            for start in range(0, num_all, size)
        ]
        self._ops = context.ops
        self._attention = attention
        self._num_heads = form.num_heads // context.group.size
        self._form = AttentionForm(form.scale)
        self._project = ColumnLinear(context, parts, hidden, bias=project.bias is not None)
        self._output = RowLinear(
            context, f"{name}.{form.output}", *sizes_of(output), Shard(1, own.start, own.stop),
            bias=output.bias is not None,
        )  # fmt: skip
        self._names = list(inspect.signature(module.forward).parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = given[_X]
        heads = self._project(x).view(len(x), 3 * self._num_heads, -1)
        batch = self._attention.batch(1, len(x), given[_ENDS])
        cos, sin = given[_ROTATION]
        rotation = self._attention.rotation(cos, sin, heads.dtype)
        out = self._ops.sequence_attention(heads, self._num_heads, batch, self._form, rotation=rotation)
        return self._output(out.flatten(1))
