"""The class that a plugin derives from, where vLLM's programs import it."""

from quire.frontend.io_processors.interface import IOProcessor

__all__ = ["IOProcessor"]
