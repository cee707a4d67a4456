"""The engine loop and process, and the client that keeps one alive."""
