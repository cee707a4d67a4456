"""Adapters of requests, where vLLM's programs import them."""

from quire.frontend.checkpoint.adapters import LoRARequest

__all__ = ["LoRARequest"]
