"""OpenAI's Responses API: conversations that the server may keep, and answers made of typed items."""
