"""Plugins of installed packages that make prompts of a client's own data, and its answer of the model's outputs."""
