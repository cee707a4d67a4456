"""Families with attention and a plain feed-forward network in every layer, some with a variant of experts."""
