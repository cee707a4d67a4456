"""The asynchronous engine, where vLLM's programs import it."""

from quire.frontend.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
