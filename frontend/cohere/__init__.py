"""Cohere's embedding API."""
