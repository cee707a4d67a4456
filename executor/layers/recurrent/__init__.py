"""Layers whose state of a sequence has a fixed size."""
