"""The backend for accelerators takes what the interface of backends says."""

import inspect

import pytest

from quire.ops.backend import Backend
from quire.ops.sampling import SamplingOperations
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.sampling import TritonSampling


@pytest.mark.parametrize(("kind", "declared"), [(TritonBackend, Backend), (TritonSampling, SamplingOperations)])
def test_an_operation_takes_the_arguments_that_are_declared(kind: type, declared: type) -> None:
    for name in vars(declared).keys() & vars(kind).keys():
        operation = getattr(kind, name)
        if inspect.isfunction(operation) and not name.startswith("__"):
            given, wanted = (inspect.signature(each).parameters for each in (operation, getattr(declared, name)))
            names = [(each, given[each].kind, given[each].default) for each in given]
            assert names == [(each, wanted[each].kind, wanted[each].default) for each in wanted], name
