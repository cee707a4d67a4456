"""The part of CUDA's driver that loads and launches kernels, without a C compiler."""

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint, c_void_p
from typing import Any

_MAX_DYNAMIC_SHARED_BYTES = 8
_SHARED_MEMORY_CARVEOUT = 9
_DEFAULT_SHARED_BYTES = 48 * 1024
_INVALID_CONTEXT = 201
_RELAXED_CAPTURE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class DriverError(RuntimeError):
    """The driver refuses a call; the text has the call and the reason."""


class Driver:
    """Calls of `libcuda.so.1`.

    Attributes:
        launch: launches a kernel, and returns the driver's result, 0 for success. It takes the addresses of a
            `LaunchConfig`, of the function and of an array of pointers to the arguments, and None.
    """

    def __init__(self, library: Any = None) -> None:
        """Takes the library, which is found if it is None.

        Raises:
            OSError: there is no driver.
        """
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        pointer = ctypes.POINTER
        self._declare("cuModuleLoadData", pointer(c_void_p), c_char_p)
        self._declare("cuModuleGetFunction", pointer(c_void_p), c_void_p, c_char_p)
        self._declare("cuFuncSetAttribute", c_void_p, c_int, c_int)
        self._declare("cuGetErrorString", c_int, pointer(c_char_p))
        self._declare("cuThreadExchangeStreamCaptureMode", pointer(c_int))
        self._declare("cuDevicePrimaryCtxRetain", pointer(c_void_p), c_int)
        self._declare("cuCtxSetCurrent", c_void_p)
        self._declare("cuLaunchKernelEx", c_void_p, c_void_p, c_void_p, c_void_p)
        self.launch: Callable[[int, int, int, None], int] = self._library.cuLaunchKernelEx

    def _declare(self, name: str, *types: Any) -> None:
        function = getattr(self._library, name)
        function.argtypes, function.restype = types, c_int

    def load(self, code: bytes, entry: str, shared_bytes: int, device: int) -> int:
        """Loads a kernel for the lifetime of the process, also while a graph is captured; returns its handle.

        Raises:
            DriverError: the machine code is not for this card, or needs more shared memory than it has.
        """
        self.enter(device)
        mode = c_int(_RELAXED_CAPTURE)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            module, function = c_void_p(), c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), code)
            self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
            if shared_bytes > _DEFAULT_SHARED_BYTES:
                self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
                self._call("cuFuncSetAttribute", function, _SHARED_MEMORY_CARVEOUT, 100)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert function.value is not None
        return function.value

    def check(self, name: str, result: int) -> None:
        """Raises DriverError if the result of the call `name` is none of success."""
        if result:
            text = c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {reason} ({result})")

    def enter(self, device: int) -> None:
        """Makes the device's context, which torch shares, that of this thread."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        self.check(name, getattr(self._library, name)(*arguments))


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` with a whole number as its value."""

    _fields_ = [("name", c_uint), ("padding", c_uint), ("value", c_int), ("rest", ctypes.c_byte * 60)]


def early_start() -> LaunchAttribute:
    """The attribute of a kernel that may start before the end of the one before it."""
    return LaunchAttribute(name=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)


def is_context_missing(result: int) -> bool:
    """Returns True for the result of a launch in a thread that has not used the device yet."""
    return result == _INVALID_CONTEXT
