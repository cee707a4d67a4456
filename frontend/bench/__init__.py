"""Benchmarks with vLLM's flags and figures."""
