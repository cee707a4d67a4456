"""A suite of cases whose operations fail in each way that kernels can."""

import os
import time
from typing import Any

import torch
from torch import Tensor

from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.canary_cases import CASES as REAL_CASES
from quire.ops.triton.canary_inputs import Case, Inputs


class BrokenBackend(EagerBackend[Any]):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = super().rms_norm(x, weight, eps)
        out[0, -1] += 1
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        time.sleep(600)
        return x

    def activate_and_mul(self, x: Tensor, activation: Any = "silu") -> Tensor:
        os._exit(7)


def backends() -> tuple[Any, Any]:
    return BrokenBackend(PlainLinear()), EagerBackend(PlainLinear())


def _add(ops: Any, make: Inputs) -> list[Tensor]:
    return [ops.add(make.normal(3, 4), make.normal(3, 4))]


def _end(ops: Any, make: Inputs) -> list[Tensor]:
    return [ops.activate_and_mul(make.normal(3, 4))]


def _rotate(ops: Any, make: Inputs) -> list[Tensor]:
    return [ops.join([make.normal(3, 4), make.normal(3, 2)]), make.place([1, 2], torch.int64)]


CASES = (
    *(case for case in REAL_CASES if case.name in ("rms_norm", "layer_norm")),
    Case("hangs", ("add", "scale"), _add),
    Case("ends", ("activate_and_mul",), _end),
    Case("right", ("join",), _rotate),
)
