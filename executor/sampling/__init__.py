"""From logits to token ids, one file a feature."""
