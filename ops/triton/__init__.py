"""Triton kernels for accelerators, behind the operations that `quire.ops.backend` declares."""
