"""Each model's format of calls and of reasoning."""
