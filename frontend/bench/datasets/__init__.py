"""The requests of benchmarks: generated from a seed, or read from a file."""
