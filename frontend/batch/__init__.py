"""The batch runner: runs a file of requests through a new engine."""
