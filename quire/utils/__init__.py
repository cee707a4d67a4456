"""Helpers, where vLLM's programs import them."""

from uuid import uuid4

from quire.frontend.flags.programs import ProgramParser as FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """A random id of 16 hexadecimal digits, for a request."""
    return uuid4().hex[:16]
