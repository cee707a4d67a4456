"""Input that nobody means: a few fixed examples in the suite, and many new ones with `scripts/fuzz`."""
