"""Engines, where vLLM's programs import them."""
