"""The CPU backend: C++ kernels, and oneDNN for the linear layers that they do not cover.

Imports nothing, so that kernels can be built where there is no torch.
"""
