"""Position embeddings."""
