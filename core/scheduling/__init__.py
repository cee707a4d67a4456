"""Decides which requests are admitted, which runs next, and for how many tokens."""
