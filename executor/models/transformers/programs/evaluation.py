"""Evaluates calls of a program in float32 on example values, to compare them with formulas.

Formulas are compared on the CPU, wherever the program runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.program import Call, InStep, resolved

_HALVES = (torch.float16, torch.bfloat16)


def evaluated(calls: Sequence[Call], given: Mapping[int, Tensor], num_tokens: int) -> dict[int, Tensor]:
    """Computes all values of `calls` from `given`, in float32 also where the program has 16-bit dtypes.

    Raises:
        Exception: any error that the calls raise when they cannot run this way.
    """
    values: dict[int, Any] = dict(given)
    for call in calls:
        args = _on_cpu(resolved(call.args, values, num_tokens))  # type: ignore[arg-type]
        kwargs = _on_cpu(resolved(call.kwargs, values, num_tokens))  # type: ignore[arg-type]
        function = call.function.in_float32 if isinstance(call.function, layer_modules.RMSNorm) else call.function
        out = function(*args, **kwargs)
        for index, each in zip(call.outs, (out,) if call.is_single else out, strict=True):
            if index is not None:
                values[index] = each
    return values


def is_layer(call: Call) -> bool:
    """Returns True if a call is a layer with weights, whose output is the start of a formula."""
    is_part = isinstance(call.function, layer_modules.LayerModule) and not isinstance(
        call.function, layer_modules.RMSNorm
    )
    return is_part or isinstance(call.function, InStep)


def examples(*shape: int) -> Tensor:
    """Returns values between -1 and 1, all different."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator).mul_(2).sub_(1)


def agree(x: Tensor, y: Tensor) -> bool:
    """Returns True if two results differ only by rounding."""
    return x.shape == y.shape and bool(torch.allclose(x.float(), y.float(), rtol=1e-4, atol=2e-5))


def constants_of(arguments: Any) -> list[Tensor]:
    """Lists the tensors among nested arguments."""
    if isinstance(arguments, Mapping):
        arguments = tuple(arguments.values())
    if isinstance(arguments, Tensor):
        return [arguments]
    return [found for each in arguments for found in constants_of(each)] if type(arguments) in (tuple, list) else []


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu().float() if value.dtype in _HALVES else value.cpu()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.dtype):
        return torch.float32 if value in _HALVES else value
    if isinstance(value, dict):
        return {name: _on_cpu(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_on_cpu(each) for each in value)
    return value
