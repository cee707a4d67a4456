"""Finds a checkpoint, and reads its configuration files."""
