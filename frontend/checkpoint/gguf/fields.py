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
        rope_factors: the bytes of the float32 tensors that hold factors of rotary frequencies, by name.
    """

    def __init__(
        self,
        path: str,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        rope_factors: Mapping[str, bytes] | None = None,
    ) -> None:
        self.path = path
        self.architecture = str(metadata.get("general.architecture") or "")
        self.tensors = tensors
        self.rope_factors = rope_factors or {}
        self._metadata = metadata

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str, default: Any = None) -> Any:
        """Raises ConfigError for a value that is missing, or that differs from layer to layer."""
        value = self.get(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise self._lacks(name)
        if isinstance(value, list):
            raise ConfigError(
                f"{self.path} has a value for each layer of {self.architecture}.{name}, which is not supported."
            )
        return value

    def need_some(self, name: str, default: Any = None) -> Any:
        """The same for a count that is not 0."""
        if not (value := self.need(name, default)):
            raise self._lacks(name)
        return value

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.need_some("attention.head_count")

    @property
    def head_dim(self) -> int:
        """Numbers of a head of keys."""
        given = self.get("attention.key_length_mla") or self.get("attention.key_length")
        return given or self.need("embedding_length") // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads of layers with attention; other layers may have a zero."""
        given = self.get("attention.head_count_kv")
        if isinstance(given, list) and len(set(given) - {0}) == 1:
            return max(given)
        return self.need_some("attention.head_count_kv", self.num_heads)

    @property
    def has_attention_bias(self) -> bool:
        """True if queries, keys, values or outputs of some layer have a bias."""
        return any(self.has_any(f"attn_{part}.bias") for part in ("q", "k", "v", "output"))

    def has_any(self, name: str) -> bool:
        """Returns True if some layer has a tensor of this name, such as `attn_q.weight`."""
        return any(stored.endswith(f".{name}") for stored in self.tensors)

    def has(self, layer: int, name: str) -> bool:
        """Returns True if the layer has a tensor of this name."""
        return f"blk.{layer}.{name}" in self.tensors

    def by_layer(self, name: str) -> list[Any]:
        """A value for each layer, where the file may have one for all."""
        value = self.get(name)
        return value if isinstance(value, list) else [value] * self.need("block_count")

    def rows(self, name: str) -> int | None:
        """The second last dimension of the first layer's tensor of this name; None: no layer has one."""
        for layer in range(self.need("block_count")):
            if self.has(layer, name):
                return self.tensors[f"blk.{layer}.{name}"].shape[-2]
        return None

    def _lacks(self, name: str) -> ConfigError:
        return ConfigError(f"{self.path} lacks {self.architecture}.{name}. Download it again.")


def named(name: str, model_type: str, **more: Any) -> Config:
    """The fields that name a model, and `more`."""
    return {"architectures": [name], "model_type": model_type, **more}


def windows(fields: Fields, num_layers: int) -> Config:
    """Layers with windows and those without; where the file has no list of them, all but every fourth have one."""
    window = fields.get("attention.sliding_window") or None
    pattern = fields.get("attention.sliding_window_pattern") or [(index + 1) % 4 != 0 for index in range(num_layers)]
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and each else "full_attention" for each in pattern[:num_layers]],
    }


def granite_multipliers(fields: Fields) -> Config:
    """The multipliers of all generations of Granite."""
    return {
        "hidden_act": "silu",
        "attention_multiplier": fields.get("attention.scale", fields.head_dim**-0.5),
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "logits_scaling": fields.get("logit_scale", 1.0),
    }
