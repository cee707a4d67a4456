"""Launches engines from a user's options."""
