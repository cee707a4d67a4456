"""Benchmarks with vLLM's flags and figures: throughput, latency, serve, startup."""
