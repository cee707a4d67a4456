"""Constrains a request's output to a grammar: matchers for the sampler, one file a library."""
