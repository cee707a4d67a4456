"""OpenAI's wire format: schema, chat, completions, models."""
