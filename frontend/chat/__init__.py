"""The part that all chat protocols share: a conversation in, events out."""
