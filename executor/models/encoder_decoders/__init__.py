"""Models with an encoder and a decoder that attends to it. One file a family."""
