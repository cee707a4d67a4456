"""Data, tokenizer and template of the demo model that `quire serve` serves without a model argument."""
