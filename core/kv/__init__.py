"""Pages of the KV cache and the block tables of requests. Integers only."""
