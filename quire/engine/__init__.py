"""Engines and their options, where vLLM's programs import them."""
