"""The bound on ids that clients choose."""

MAX_ID_CHARACTERS = 200
"""Longest id that a client may choose; the rest is cut off."""
