"""Packed weights in files: their tensors, and a tree of plain values that describes their use."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StoredWeight(NamedTuple):
    """A packed weight as tensors and a description.

    Attributes:
        form: lists, dictionaries, strings and numbers, as JSON has them; a tensor is its index in `tensors`.
        tensors: dense, of any dtype.
        shape: of a linear layer's weight, [out, in]; empty for experts.
    """

    form: Any
    tensors: list[Tensor]
    shape: tuple[int, ...] = ()


def take_apart(packed: object, shape: Sequence[int] = ()) -> StoredWeight:
    """Converts a packed weight of tensors, plain values, tuples, lists, dataclasses and named tuples."""
    tensors: list[Tensor] = []
    return StoredWeight(_taken_apart(packed, tensors), tensors, tuple(shape))


def put_together(stored: StoredWeight, types: Iterable[type]) -> Any:
    """Restores the packed weight. Its classes are among `types`.

    Raises:
        ValueError: the form is not one of theirs.
    """
    try:
        return _put_together(stored.form, stored.tensors, {kind.__name__: kind for kind in types})
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"a stored weight has another form than this version reads: {error!r}") from None


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        in_blocks = value.layout != torch.strided  # oneDNN's own layout, which can only be stored as plain values
        tensors.append(value.to_dense() if in_blocks else value)
        return {"blocked" if in_blocks else "tensor": len(tensors) - 1}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop]}
    if isinstance(value, list):
        return [_taken_apart(part, tensors) for part in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):
        names = list(value._fields)
    elif isinstance(value, tuple):
        return {"tuple": [_taken_apart(part, tensors) for part in value]}
    else:
        raise TypeError(f"a packed weight holds a {type(value).__name__}, which cannot be stored")
    parts = {name: _taken_apart(getattr(value, name), tensors) for name in names}
    return {"type": type(value).__name__, "parts": parts}


def _put_together(form: Any, tensors: Sequence[Tensor], types: dict[str, type]) -> Any:
    if isinstance(form, list):
        return [_put_together(part, tensors, types) for part in form]
    if not isinstance(form, dict):
        return form
    if "type" in form:
        return types[form["type"]](
            **{name: _put_together(part, tensors, types) for name, part in form["parts"].items()}
        )
    [(kind, value)] = form.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "blocked":
            return torch.ops.mkldnn._reorder_linear_weight(tensors[value])
        case "dtype":
            return getattr(torch, value)
        case "slice":
            return slice(*value)
        case "tuple":
            return tuple(_put_together(part, tensors, types) for part in value)
    raise KeyError(kind)
