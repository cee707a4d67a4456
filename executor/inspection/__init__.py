"""Inspects a model without running it, in a separate process."""
