"""Data, tokenizer and template of the demo model, which `quire serve` serves by default."""
