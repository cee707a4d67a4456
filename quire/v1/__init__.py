"""Engines and metrics, where vLLM's programs import them."""
