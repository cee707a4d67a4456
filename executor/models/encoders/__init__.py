"""Encoders: attention in both directions, no KV cache. One file a kind."""
