"""Looks at a model without running it, in a process of its own."""
