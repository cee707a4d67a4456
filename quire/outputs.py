"""Outputs of requests, where vLLM's programs import them."""

from quire.frontend.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
