"""Plugins of data in and out of pooling models."""
