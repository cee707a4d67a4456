"""Quire serves large language models. `from quire import LLM, AsyncLLM, SamplingParams`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.core.wire.sampling_params import SamplingParams
    from quire.core.wire.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from quire.executor.sampling.custom import LogitsProcessor
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.llm import LLM
    from quire.frontend.outputs import CompletionOutput, RequestOutput
    from quire.frontend.requests.beam_params import BeamSearchParams

    __version__: str

_LAZY = {
    "LLM": "quire.frontend.llm",
    "AsyncLLM": "quire.frontend.async_llm",
    "SamplingParams": "quire.core.wire.sampling_params",
    "StructuredOutputsParams": "quire.core.wire.structured_outputs",
    "GuidedDecodingParams": "quire.core.wire.structured_outputs",
    "BeamSearchParams": "quire.frontend.requests.beam_params",
    "LogitsProcessor": "quire.executor.sampling.custom",
    "RequestOutput": "quire.frontend.outputs",
    "CompletionOutput": "quire.frontend.outputs",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "GuidedDecodingParams",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports a public class on first use, so that a process imports only the code that it runs."""
    if name == "__version__":
        return _version()
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # imported here: it takes 20 ms

    try:
        return version("quire")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0.0.0"
