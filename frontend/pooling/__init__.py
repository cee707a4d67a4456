"""Embeddings, pooled outputs, labels and scores, in the forms of OpenAI's API and of vLLM's."""
