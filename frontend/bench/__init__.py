"""Benchmarks: throughput, latency, serve and startup with vLLM's flags and figures, and benchmarks of our own."""
