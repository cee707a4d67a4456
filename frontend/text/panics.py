"""Failures of the `tokenizers` library: its own errors, and panics, which `except Exception` would let pass."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from quire.core.errors import TokenizerError

P = ParamSpec("P")
T = TypeVar("T")


def is_panic(error: BaseException) -> bool:
    """Returns True for a panic of a library in Rust. Its class cannot be imported."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def without_panics(call: Callable[P, T]) -> Callable[P, T]:
    """A function that raises RuntimeError where `call` panics."""

    @functools.wraps(call)
    def guarded(*args: P.args, **options: P.kwargs) -> T:
        try:
            return call(*args, **options)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RuntimeError(f"the library failed ({error})") from None

    return guarded


def failing_as_tokenizer(call: Callable[P, T]) -> Callable[P, T]:
    """A function that raises TokenizerError where the library fails in `call`, except TypeError: a wrong text."""

    @functools.wraps(call)
    def guarded(*args: P.args, **options: P.kwargs) -> T:
        try:
            return call(*args, **options)
        except TypeError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise TokenizerError(
                f"The model's tokenizer failed on this text: {reason}. Its tokenizer.json is at fault; the server's "
                "operator can name another with --tokenizer."
            ) from None

    return guarded
