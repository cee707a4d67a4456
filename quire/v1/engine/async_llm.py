"""The asynchronous engine, where vLLM's programs import it."""

from quire.frontend.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
