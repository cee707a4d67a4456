"""Recognizes rotary embeddings in a program by what they compute, and replaces them by our operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.evaluation import agree, constants_of, evaluated, examples
from quire.executor.models.transformers.programs.program import Call, InStep, Meta, Program, Ref
from quire.ops.backend import Backend

_VIEWS = frozenset({"view", "reshape", "transpose", "permute", "unsqueeze", "narrow", "chunk", "split", "__getitem__"})


class Positions(NamedTuple):
    """The positions of a program's tokens.

    Attributes:
        input: the program's input that has them.
        compared: those of the tokens on which formulas are compared, the context's last among them: some classes scale
            queries from a position on (https://arxiv.org/abs/2501.19399).
    """

    input: int
    compared: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, max_model_len: int) -> "Positions":
        """Returns those of a program for contexts of up to `max_model_len` tokens."""
        some = {0, 1, 2, 17, 200, max_model_len // 2, max_model_len - 1}
        return cls(program.inputs[1], tuple(sorted(each for each in some if each < max_model_len)))

    def computed(self, calls: Sequence[Call], given: dict[int, Tensor]) -> dict[int, Tensor] | None:
        """Computes all values of `calls`; None if they cannot run on `given`."""
        try:
            return evaluated(calls, {**given, self.input: torch.tensor(self.compared)}, len(self.compared))
        except Exception:  # a class's code that wants what it had in the trace
            return None


@dataclass(eq=False)
class Rotation(InStep):
    """Computes cosines and sines of a step's positions, both [num_tokens, 1, rotary_dim]."""

    ops: Backend
    frequencies: Tensor
    scale: float
    dtype: torch.dtype

    def __call__(self, step: StepContext) -> tuple[Tensor, Tensor]:
        return self.ops.rotation(step.positions, self.frequencies, self.scale, self.dtype)


@dataclass(eq=False)
class TableRotation(InStep):
    """Looks them up in tables of all positions, [num_positions, rotary_dim], in the layout of `Backend.rotary`."""

    ops: Backend
    cos: Tensor
    sin: Tensor

    def __call__(self, step: StepContext) -> tuple[Tensor, Tensor]:
        cos, sin = (self.ops.take_rows(table, step.positions).unsqueeze(1) for table in (self.cos, self.sin))
        return cos, sin


@dataclass(eq=False)
class Rotate:
    """Rotates heads [1, num_tokens, heads, size] or, if `is_transposed`, [1, heads, num_tokens, size]."""

    ops: Backend
    is_transposed: bool

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.is_transposed:
            return self.ops.rotary(x[0].transpose(0, 1), cos, sin).transpose(0, 1).unsqueeze(0)
        return self.ops.rotary(x[0], cos, sin).unsqueeze(0)


class RotaryForm(NamedTuple):
    """The rotation of heads.

    Attributes:
        frequencies: radians a position [rotary_dim / 2], float32, negative for the other direction; None: no rotation,
            or one by a table.
        scale: multiplies cosines and sines.
        is_interleaved: pairs are neighbours.
        table: cosines and sines of all positions, [2, num_positions, rotary_dim / 2], instead of frequencies.
    """

    frequencies: Tensor | None
    scale: float = 1.0
    is_interleaved: bool = False
    table: Tensor | None = None

    @property
    def is_rotation(self) -> bool:
        """True if anything is rotated."""
        return self.frequencies is not None or self.table is not None


class Rotations:
    """The calls of a program that compute cosines and sines, one for each rotation."""

    def __init__(self, program: Program, ops: Backend, device: torch.device) -> None:
        self._program = program
        self._ops = ops
        self._device = device
        self._calls: dict[tuple[tuple[float, ...], float], Call] = {}
        self._table_calls: list[tuple[Tensor, Call]] = []

    def arguments(self, rotary: RotaryForm, dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns cosines and sines as arguments of a call."""
        if rotary.table is not None:
            return self._refs(self._table_call(rotary.table, dtype))
        if rotary.frequencies is None:
            return (torch.empty(1, 1, 0, dtype=dtype, device=self._device),) * 2
        key = tuple(rotary.frequencies.tolist()), rotary.scale
        if key not in self._calls:
            rotation = Rotation(self._ops, rotary.frequencies.contiguous(), rotary.scale, dtype)
            self._calls[key] = self._call(rotation, 2 * len(rotary.frequencies), dtype)
        return self._refs(self._calls[key])

    def _table_call(self, table: Tensor, dtype: torch.dtype) -> Call:
        """Returns the call for a table. A class may have equal tables in all layers; they share a call."""
        for known, call in self._table_calls:
            if known.shape == table.shape and bool((known == table).all()):
                return call
        cos, sin = table.to(dtype)
        rotation = TableRotation(self._ops, torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1))
        self._table_calls.append((table, self._call(rotation, 2 * table.shape[2], dtype)))
        return self._table_calls[-1][1]

    def _call(self, rotation: Rotation | TableRotation, rotary_dim: int, dtype: torch.dtype) -> Call:
        outs = tuple(self._program.add_value(Meta((1, 1, rotary_dim), dtype, -1, axis=0)) for _ in range(2))
        return Call(rotation, (), {}, outs, is_single=False)

    @staticmethod
    def _refs(call: Call) -> tuple[Any, ...]:
        return tuple(Ref(out) for out in call.outs if out is not None)

    def fuse(self, heads: int, positions: Positions) -> None:
        """Puts `Rotate` where `heads`, or values from which they are computed, are rotated in NeoX order."""
        calls, _ = self._program.slice_to([heads], lambda call: isinstance(call.function, InStep))
        for call in reversed(calls):
            if isinstance(call.function, layer_modules.LayerModule) and not isinstance(
                call.function, layer_modules.RMSNorm | layer_modules.LayerNorm
            ):
                return
            found = _read_rotation(self._program, call, positions)
            if found is not None:
                source, rotary = found
                meta = self._program.metas[source]
                call.function, call.kwargs = Rotate(self._ops, meta.axis == 2), {}
                call.args = (Ref(source), *self.arguments(rotary, meta.dtype))
                return

    def insert(self) -> None:
        """Inserts the calls at the beginning of the program."""
        self._program.calls[:0] = [*self._calls.values(), *(call for _, call in self._table_calls)]


def _read_rotation(program: Program, call: Call, positions: Positions) -> tuple[int, RotaryForm] | None:
    """Returns the heads that `call` rotates, and the rotation."""
    target = call.outs[0]
    if not call.is_single or target is None:
        return None
    shape, axis = program.metas[target].shape, program.metas[target].axis
    if len(shape) != 4 or axis not in (1, 2):
        return None

    def is_alike(value: int | None) -> bool:
        return value is not None and program.metas[value].shape == shape and program.metas[value].axis == axis

    def stops(each: Call) -> bool:
        is_view = (
            each is not call and getattr(each.function, "__name__", "") in _VIEWS and any(map(is_alike, each.outs))
        )
        return is_view or isinstance(each.function, layer_modules.LayerModule | InStep)

    calls, starts = program.slice_to([target], stops)
    starts.discard(positions.input)
    if len(starts) != 1 or not is_alike(min(starts)):
        return None
    [source] = starts
    x = examples(1, *(len(positions.compared) if each == axis else shape[each] for each in (1, 2, 3)))
    values = positions.computed(calls, {source: x})
    if values is None:
        return None
    got, rows = (each[0].transpose(0, axis - 1) for each in (values[target], x))
    rotary = read_rotary_form(got, rows, calls, positions.compared)
    return (source, rotary) if rotary is not None and rotary.is_rotation and not rotary.is_interleaved else None


def read_rotary_form(got: Tensor, x: Tensor, calls: Sequence[Call], positions: Sequence[int]) -> RotaryForm | None:
    """Finds the rotation by which `calls` map `x` [num_tokens, heads, size] to `got`; None if it is none."""
    if agree(got, x):
        return RotaryForm(None)
    constants = [each for call in calls for each in constants_of((call.args, call.kwargs)) if each.is_floating_point()]
    for each in constants:
        half = len(each) if each.dim() == 1 else 0
        if not 0 < 2 * half <= x.shape[2]:
            continue
        scale = ratio(got[..., : 2 * half], x[..., : 2 * half])
        for is_interleaved, frequencies in product((False, True), (each.float(), -each.float())):
            pair = (paired(got, half), paired(x, half)) if is_interleaved else (got, x)
            angles = torch.tensor(positions).unsqueeze(1) * frequencies.cpu()
            if agree(pair[0], _rotated(pair[1], angles.cos() * scale, angles.sin() * scale)):
                return RotaryForm(frequencies, scale, is_interleaved)
    return next((rotary for each in constants if (rotary := _read_table(got, x, each, positions)) is not None), None)


def _read_table(got: Tensor, x: Tensor, table: Tensor, positions: Sequence[int]) -> RotaryForm | None:
    """Finds the rotation if `table` has the cosines of each position, then the sines, or the reverse."""
    if table.dim() != 2 or len(table) <= max(positions) or table.shape[1] % 2 or table.shape[1] > x.shape[2]:
        return None
    first, second = table.chunk(2, dim=1)
    for cos, sin in ((first, second), (second, first)):
        rows = [each[list(positions)].float().cpu() for each in (cos, sin)]
        for is_interleaved in (False, True):
            pair = (paired(got, cos.shape[1]), paired(x, cos.shape[1])) if is_interleaved else (got, x)
            if agree(pair[0], _rotated(pair[1], *rows)):
                return RotaryForm(None, 1.0, is_interleaved, torch.stack((cos, sin)))
    return None


def ratio(got: Tensor, x: Tensor) -> float:
    """Returns the factor of `x`, from the first token, which is at position 0."""
    return float((got[0] / x[0]).median())


def paired(x: Tensor, half: int) -> Tensor:
    """Moves the pairs (2i, 2i + 1) of the first `2 * half` elements of each head to (i, i + half)."""
    return torch.cat((x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]), dim=-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Runs `Backend.rotary` on `x` [num_tokens, heads, size] with cosines and sines [num_tokens, rotary_dim / 2]."""
    half, cos, sin = cos.shape[1], cos.unsqueeze(1), sin.unsqueeze(1)
    a, b, rest = x.split((half, half, x.shape[2] - 2 * half), dim=2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=2)
