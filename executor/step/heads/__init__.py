"""From hidden states to what a row wants besides sampled tokens, one file a head."""
