"""The batch runner: a file of requests through an engine of its own."""
