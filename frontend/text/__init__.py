"""Text and token ids: tokenizer, streams of text, chat templates."""
