"""Decoders that have no file here: the checkpoint's class of the Transformers library, with its parts exchanged."""
