"""Options, where vLLM's programs import them."""

from quire.core.config.pooling import PoolerConfig

__all__ = ["PoolerConfig"]
