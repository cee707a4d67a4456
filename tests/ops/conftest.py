"""The C++ kernels, for the tests that are about them."""

import ctypes
from pathlib import Path

import pytest

from quire.ops.cpu import NativeBackend, load_kernels
from quire.ops.cpu.compiler import build, cache_folder
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend

CPU_INFO = Path("/proc/cpuinfo")
HAS_AMX = CPU_INFO.exists() and "amx_bf16" in CPU_INFO.read_text()


@pytest.fixture(scope="session", params=["all instructions", "no AMX"] if HAS_AMX else ["all instructions"])
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """A processor with AMX also runs what those without it run."""
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("this machine has no C++ compiler")
    if request.param == "no AMX":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", "c++ -mno-amx-bf16")
            kernels = ctypes.CDLL(str(build(cache_folder())))
    return NativeBackend(kernels, EagerBackend(OneDnnLinear()))
