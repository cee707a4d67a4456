"""What the servers of one command keep between requests: entries by id, which any of them may read."""
