"""Pages for readers: how to call the server, and its OpenAPI document."""
