"""One file a model family, and the registry."""
