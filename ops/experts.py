"""Checks that the experts of a layer have one form, as the backends' layouts of them require."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quire.ops.backend import ExpertWeights, LinearWeight, UnlikeExpertsError
from quire.ops.quantized import QuantizedWeight


def alike(experts: Iterable[ExpertWeights]) -> Iterator[ExpertWeights]:
    """Yields the experts one by one.

    Raises:
        UnlikeExpertsError: one has tensors of other dtypes or shapes than the first, or codes of other values.
    """
    form: tuple[object, ...] | None = None
    tables: list[Tensor] = []  # of the first expert, whose other tensors are dropped
    for index, expert in enumerate(experts):
        if form is None:
            form, tables = _form(expert), _tables(expert)
        if _form(expert) != form or not all(map(_are_equal, _tables(expert), tables)):
            raise UnlikeExpertsError(f"experts 0 and {index} of a layer are stored in different ways")
        yield expert


def _form(part: LinearWeight | ExpertWeights | bool | None) -> tuple[object, ...]:
    if isinstance(part, Tensor):
        return part.dtype, part.shape
    return tuple(map(_form, part)) if isinstance(part, tuple) else (part,)


def _tables(expert: ExpertWeights) -> list[Tensor]:
    return [part.table for part in expert if isinstance(part, QuantizedWeight) and part.table is not None]


def _are_equal(table: Tensor, other: Tensor) -> bool:
    return table is other or table.is_meta or torch.equal(table, other)
