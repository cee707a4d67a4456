"""What all chat protocols share: a conversation in, events out."""
