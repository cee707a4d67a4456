"""Families without attention."""
