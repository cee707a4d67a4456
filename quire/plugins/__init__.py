"""Plugins, where vLLM's programs import their classes."""
