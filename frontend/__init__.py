"""The frontend: HTTP, the Python API, the command line, and all text. The frontend process does not import torch."""
