"""Quire serves large language models. `from quire import LLM, AsyncLLM, SamplingParams`."""

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.core.wire.pooling_params import PoolingParams
    from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
    from quire.core.wire.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from quire.executor.sampling.custom import LogitsProcessor
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.frontend.checkpoint.adapters import LoRARequest
    from quire.frontend.checkpoint.registered_models import register_model
    from quire.frontend.flags.programs import CommandLineOptions as AsyncEngineArgs
    from quire.frontend.flags.programs import CommandLineOptions as EngineArgs
    from quire.frontend.llm import LLM
    from quire.frontend.offline.engine import LLMEngine
    from quire.frontend.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        FlatLogprobs,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.frontend.requests.beam_params import BeamSearchParams
    from quire.frontend.requests.prompt import EmbedsPrompt, TextPrompt, TokensPrompt
    from quire.frontend.requests.prompt import PromptLike as PromptType

    __version__: str
    __version_tuple__: tuple[int | str, ...]

_LAZY = {
    "LLM": "quire.frontend.llm:LLM",
    "LLMEngine": "quire.frontend.offline.engine:LLMEngine",
    "AsyncLLM": "quire.frontend.async_llm:AsyncLLM",
    "AsyncLLMEngine": "quire.frontend.async_llm:AsyncLLM",
    "EngineArgs": "quire.frontend.flags.programs:CommandLineOptions",
    "AsyncEngineArgs": "quire.frontend.flags.programs:CommandLineOptions",
    "SamplingParams": "quire.core.wire.sampling_params:SamplingParams",
    "RequestOutputKind": "quire.core.wire.sampling_params:RequestOutputKind",
    "PoolingParams": "quire.core.wire.pooling_params:PoolingParams",
    "StructuredOutputsParams": "quire.core.wire.structured_outputs:StructuredOutputsParams",
    "GuidedDecodingParams": "quire.core.wire.structured_outputs:GuidedDecodingParams",
    "BeamSearchParams": "quire.frontend.requests.beam_params:BeamSearchParams",
    "LoRARequest": "quire.frontend.checkpoint.adapters:LoRARequest",
    "LogitsProcessor": "quire.executor.sampling.custom:LogitsProcessor",
    "RequestOutput": "quire.frontend.outputs:RequestOutput",
    "CompletionOutput": "quire.frontend.outputs:CompletionOutput",
    "PoolingOutput": "quire.frontend.outputs:PoolingOutput",
    "PoolingRequestOutput": "quire.frontend.outputs:PoolingRequestOutput",
    "EmbeddingOutput": "quire.frontend.outputs:EmbeddingOutput",
    "EmbeddingRequestOutput": "quire.frontend.outputs:EmbeddingRequestOutput",
    "ClassificationOutput": "quire.frontend.outputs:ClassificationOutput",
    "ClassificationRequestOutput": "quire.frontend.outputs:ClassificationRequestOutput",
    "ScoringOutput": "quire.frontend.outputs:ScoringOutput",
    "ScoringRequestOutput": "quire.frontend.outputs:ScoringRequestOutput",
    "Logprob": "quire.frontend.outputs:Logprob",
    "FlatLogprobs": "quire.frontend.outputs:FlatLogprobs",
    "PromptType": "quire.frontend.requests.prompt:PromptLike",
    "TextPrompt": "quire.frontend.requests.prompt:TextPrompt",
    "TokensPrompt": "quire.frontend.requests.prompt:TokensPrompt",
    "EmbedsPrompt": "quire.frontend.requests.prompt:EmbedsPrompt",
    "register_model": "quire.frontend.checkpoint.registered_models:register_model",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
    "register_model",
]
_NOT_OFFERED = {
    "ModelRegistry": "Quire's model families are listed in quire.executor.models.architectures.",
    "initialize_ray_cluster": "servers with distributed_executor_backend='ray' and nnodes start the nodes themselves.",
}


def __getattr__(name: str) -> Any:
    """Imports a public class on first use, so that a process imports only the code that it runs."""
    if name == "__version__":
        return _version()
    if name == "__version_tuple__":
        return tuple(int(part) if part.isdigit() else part for part in _version().split("."))
    if name not in _LAZY:
        reason = f": {_NOT_OFFERED[name]}" if name in _NOT_OFFERED else ""
        raise AttributeError(f"module 'quire' has no attribute {name!r}{reason}")
    return pkgutil.resolve_name(_LAZY[name])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # imported here: it takes 20 ms

    try:
        return version("quire")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0.0.0"
