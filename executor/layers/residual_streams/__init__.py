"""Residual streams, and what is added to them beside the blocks."""
