"""Text of a model's answer in, events out: reasoning and tool calls are told apart from the answer."""
