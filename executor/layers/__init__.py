"""Parallel-aware building blocks of models."""
