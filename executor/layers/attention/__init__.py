"""Attention layers, and what they keep of a sequence."""
