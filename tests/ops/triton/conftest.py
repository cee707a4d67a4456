"""Runs kernels in Triton's interpreter where there is no accelerator; it must be chosen before a kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
