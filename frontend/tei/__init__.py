"""The protocol of Hugging Face's Text Embeddings Inference."""
