"""Prompts and sampling parameters become engine requests; the engine's deltas become each request's outputs."""
