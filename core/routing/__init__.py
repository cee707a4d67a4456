"""Chooses an engine for each request, where several engines hold the same model."""
