"""The engine for programs without an event loop, where vLLM's programs import it."""

from quire.frontend.offline.engine import LLMEngine

__all__ = ["LLMEngine"]
