"""The shapes that calls have in a text: code, which a model's format fills with its words."""
