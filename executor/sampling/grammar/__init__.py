"""Holding a request's output to a grammar: matchers beside the sampler, one file a library."""
