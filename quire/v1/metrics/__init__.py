"""Metrics, where vLLM's programs import them."""
