"""The C++ kernels, for the tests that are about them."""

import pytest

from quire.ops.cpu import NativeBackend, load_kernels


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("this machine has no C++ compiler")
    return NativeBackend(kernels)
