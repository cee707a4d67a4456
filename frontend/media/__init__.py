"""Sounds and pictures of clients: decoded in helper processes, within limits, into what a model's encoder reads."""
