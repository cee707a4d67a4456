"""Context parallelism: ranks that hold the same KV heads divide the positions of sequences."""
