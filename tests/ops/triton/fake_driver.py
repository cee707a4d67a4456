"""A library with the calls of CUDA's driver that a launcher makes. It computes nothing, and keeps what it is told."""

import ctypes
import struct
from ctypes import c_char_p, c_int, c_uint, c_void_p
from typing import Any, NamedTuple

SUCCESS, INVALID_CONTEXT = 0, 201
_RETURN_CONTEXT, _RETURN_MODULE, _FIRST_FUNCTION = 0xC0, 0xD0, 0xF0


class CUlaunchConfig(ctypes.Structure):
    """As cuda.h declares it."""

    _fields_ = [
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", c_void_p),
        ("numAttrs", c_uint),
    ]


class Launch(NamedTuple):
    """A launch. `slots` are the arguments' copies, 8 bytes each; `attributes` are names and values."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    slots: list[bytes]
    attributes: list[tuple[int, int]]


class FakeLibrary:
    """Each function has the prototype that cuda.h gives it.

    Attributes:
        num_arguments: of each kernel, by its name: how many pointers a launch reads.
        launches: all launches.
        attributes: what was set for functions: (name, attribute, value).
        loaded: machine code of the modules.
        results: what the next launches return, in order, before success.
        contexts: devices whose context was made current.
    """

    def __init__(self, num_arguments: dict[str, int]) -> None:
        self.num_arguments = num_arguments
        self.launches: list[Launch] = []
        self.attributes: list[tuple[str, int, int]] = []
        self.loaded: list[bytes] = []
        self.results: list[int] = []
        self.contexts: list[int] = []
        self._names: list[str] = []
        pointer = ctypes.POINTER(c_void_p)
        self.cuDevicePrimaryCtxRetain = self._export(self._retain, pointer, c_int)
        self.cuCtxSetCurrent = self._export(lambda context: SUCCESS, c_void_p)
        self.cuThreadExchangeStreamCaptureMode = self._export(lambda mode: SUCCESS, ctypes.POINTER(c_int))
        self.cuModuleLoadData = self._export(self._load, pointer, c_void_p)
        self.cuModuleGetFunction = self._export(self._get_function, pointer, c_void_p, c_char_p)
        self.cuFuncSetAttribute = self._export(self._set_attribute, c_void_p, c_int, c_int)
        self.cuGetErrorString = self._export(self._tell, c_int, ctypes.POINTER(c_char_p))
        config = ctypes.POINTER(CUlaunchConfig)
        self.cuLaunchKernelEx = self._export(self._launch, config, c_void_p, pointer, c_void_p)

    def _export(self, function: Any, *types: Any) -> Any:
        return ctypes.CFUNCTYPE(c_int, *types)(function)

    def _retain(self, context: Any, device: int) -> int:
        self.contexts.append(device)
        context[0] = _RETURN_CONTEXT
        return SUCCESS

    def _load(self, module: Any, code: int) -> int:
        self.loaded.append(ctypes.string_at(code, 4))
        module[0] = _RETURN_MODULE
        return SUCCESS

    def _get_function(self, function: Any, module: int, name: bytes) -> int:
        assert module == _RETURN_MODULE
        function[0] = _FIRST_FUNCTION + len(self._names)
        self._names.append(name.decode())
        return SUCCESS

    def _set_attribute(self, function: int, attribute: int, value: int) -> int:
        self.attributes.append((self._names[function - _FIRST_FUNCTION], attribute, value))
        return SUCCESS

    def _tell(self, result: int, text: Any) -> int:
        text[0] = b"out of patience"
        return SUCCESS

    def _launch(self, configs: Any, function: int, arguments: Any, extra: int | None) -> int:
        config = configs[0]
        assert extra is None
        read = [ctypes.string_at(config.attrs + 72 * number, 72) for number in range(config.numAttrs)]
        attributes = [struct.unpack("<I4xi", each[:12]) for each in read]  # the name, and a whole number
        name = self._names[function - _FIRST_FUNCTION]
        slots = [ctypes.string_at(arguments[number], 8) for number in range(self.num_arguments[name])]
        result = self.results.pop(0) if self.results else SUCCESS
        if result == SUCCESS:
            grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
            block = (config.blockDimX, config.blockDimY, config.blockDimZ)
            self.launches.append(
                Launch(name, grid, block, config.sharedMemBytes, config.hStream or 0, slots, attributes)
            )
        return result
