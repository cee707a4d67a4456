"""Decoders without a file here: the checkpoint's Transformers class, with its layers replaced by ours."""
