"""Checkpoints as tensors, each rank only its shard."""
