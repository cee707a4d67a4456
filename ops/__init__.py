"""Kernels behind plain functions; one backend is bound once."""
