"""The formats of quantized checkpoints, a file each."""
