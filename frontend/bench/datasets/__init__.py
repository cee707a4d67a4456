"""What benchmarks send: requests made up from a seed, or read from a file."""
