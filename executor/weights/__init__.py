"""Reads checkpoints as tensors, each rank only its shards."""
