"""Sounds: files to samples, samples to clips, clips to features. Only the helper process imports these."""
