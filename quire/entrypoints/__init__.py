"""The blocking API, where vLLM's programs import it."""
