"""Mixtures of experts, and their division over ranks."""
