"""Text and token ids: the tokenizer, detokenization, stop strings and chat templates."""
