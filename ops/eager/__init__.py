"""The operations in plain torch, right on every device; other backends take from here what they do not make faster."""
