"""A suite whose only case finds no room on the card."""

from typing import Any

import torch
from torch import Tensor

from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.canary_inputs import Case, Inputs


class CrowdedBackend(EagerBackend[Any]):
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def backends() -> tuple[Any, Any]:
    return CrowdedBackend(PlainLinear()), EagerBackend(PlainLinear())


def _add(ops: Any, make: Inputs) -> list[Tensor]:
    return [ops.add(make.normal(3, 4), make.normal(3, 4))]


CASES = (Case("add", ("add",), _add),)
