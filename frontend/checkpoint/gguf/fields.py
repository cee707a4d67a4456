"""The metadata of a GGUF file, by names without the architecture."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.header import TensorInfo

Config = dict[str, Any]
"""Fields of config.json."""


class Fields:
    """The metadata of one file, read by names without the architecture.

    Attributes:
        tensors: those of all files of the model.
    """

    def __init__(self, path: str, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.architecture = str(metadata.get("general.architecture"))
        self.tensors = tensors
        self._metadata = metadata

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str, default: Any = None) -> Any:
        """Raises ConfigError for a value that is missing, or that differs from layer to layer."""
        value = self.get(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, list):
            fault = "lacks" if value is None else "has a value for each layer of"
            raise ConfigError(f"{self.path} {fault} {self.architecture}.{name}, which is not supported.")
        return value

    @property
    def head_dim(self) -> int:
        """Numbers of a head of keys."""
        given = self.get("attention.key_length")
        return given or self.need("embedding_length") // self.need("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Of the layers with attention; the others may have a zero."""
        given = self.get("attention.head_count_kv")
        if isinstance(given, list) and len(set(given) - {0}) == 1:
            return max(given)
        return self.need("attention.head_count_kv", self.need("attention.head_count"))

    @property
    def has_attention_bias(self) -> bool:
        return "blk.0.attn_q.bias" in self.tensors
