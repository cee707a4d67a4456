"""Parameters of requests for vectors, where vLLM's programs import them."""

from quire.core.wire.pooling_params import LateChunkingParams, PoolingParams

__all__ = ["LateChunkingParams", "PoolingParams"]
