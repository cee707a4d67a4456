"""Parses the text of a model's answer into events: content, reasoning and tool calls."""
