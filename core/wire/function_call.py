"""A function that a program runs on its workers, as bytes. A sender can do anything on the workers' hosts.

So a worker takes functions only with `allow_insecure_serialization`. The bytes are pickles of cloudpickle, which takes
lambdas and functions of scripts and notebooks too.
"""

import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

FUNCTION_CALL = "function"
"""The name of such a `WorkerCall`."""


def pack(method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """`method` and its arguments. A function takes its own module along, which workers may not be able to import."""
    import cloudpickle  # imported here, because few programs need it

    module = sys.modules.get(method.__module__) if isinstance(method, FunctionType) else None
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps((method, args, kwargs))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((method, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def run(worker: object, payload: bytes) -> bytes:
    """Calls a method of `worker` by its name, or a function with `worker` before its arguments; returns its result."""
    import cloudpickle

    method, args, kwargs = cloudpickle.loads(payload)
    result = getattr(worker, method)(*args, **kwargs) if isinstance(method, str) else method(worker, *args, **kwargs)
    return cloudpickle.dumps(result)


def unpack(result: bytes) -> Any:
    """The result of a call."""
    return pickle.loads(result)
