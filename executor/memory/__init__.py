"""The plan of a device's memory, and the allocation of the KV cache."""
