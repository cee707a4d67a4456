"""Sounds: files to samples, samples to clips, clips to features. A server reads files in a helper process alone."""
