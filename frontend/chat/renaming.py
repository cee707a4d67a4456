"""Errors with the client's names of fields, which differ between APIs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import ParameterError


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Renames fields in errors to the client's names: `renamed(max_tokens="max_output_tokens")`."""
    try:
        yield
    except ParameterError as error:
        message = str(error)
        for name, theirs in names.items():
            if "_" in name:
                message = re.sub(rf"\b{name}\b", theirs, message)
            elif name == error.param:  # a word of the language, too: only what the message is about
                message = re.sub(rf"^{name}\b", theirs, message)
        raise ParameterError(message, param=names.get(error.param or "", error.param)) from None
