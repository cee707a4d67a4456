"""The blocking API, where vLLM's programs import it."""

from quire.frontend.llm import LLM

__all__ = ["LLM"]
