"""Maps the names that models ask for to the names in a checkpoint."""

import re
from collections.abc import Container, Iterator
from typing import Protocol

from torch import Tensor

_PREFIXES = ("model.", "transformer.", "language_model.", "language_model.model.", "model.language_model.")


class Names(Protocol):
    """Finds a model's tensors in files with other names."""

    def find(self, name: str, present: Container[str]) -> str | None:
        """Returns the name in the files of the model's `name`; None: the files do not have it."""
        ...

    def arrange(self, name: str, tensor: Tensor) -> Tensor:
        """Reorders the stored tensor of the model's `name`, or a shard of it, for the model."""
        ...

    def mixes_rows(self, name: str) -> bool:
        """Returns True if `arrange` needs all rows of the tensor at once."""
        ...


class HubNames:
    """Names as on the Hugging Face hub. A checkpoint may lack the prefix of the whole model, or have one more: that of
    a bare decoder, or of the text part of a larger model.
    """

    def find(self, name: str, present: Container[str]) -> str | None:
        return next((candidate for candidate in _candidates(name) if candidate in present), None)

    def arrange(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def mixes_rows(self, name: str) -> bool:
        return False


_LEGACY = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""The ends of names of BERT's first release, which its checkpoints on the hub still have."""


def _candidates(name: str) -> Iterator[str]:
    yield name
    for end, legacy in _LEGACY.items():
        if name.endswith(end):
            yield name.removesuffix(end) + legacy
    bare = name
    for prefix in ("model.", "transformer."):
        bare = bare.removeprefix(prefix)
    yield bare
    yield from (prefix + bare for prefix in _PREFIXES)


_MISTRAL_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ROTATED = re.compile(r"self_attn\.[qk]_proj\.")


class MistralNames:
    """Names of Mistral's own releases (`consolidated.safetensors`), whose rotary embedding rotates neighbouring
    elements.

    Models here rotate the two halves of a head, so the outputs of each head of queries and keys are reordered.
    """

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim

    def find(self, name: str, present: Container[str]) -> str | None:
        layer, part = re.fullmatch(r"(?:model\.(layers\.\d+)\.)?(.*)", name).groups()  # type: ignore[union-attr]
        module, _, kind = part.rpartition(".")
        stored = ".".join([*([layer] if layer else []), _MISTRAL_NAMES.get(module, module), kind])
        return stored if stored in present else None

    def arrange(self, name: str, tensor: Tensor) -> Tensor:
        return halves_apart(tensor, self._head_dim) if _ROTATED.search(name) else tensor

    def mixes_rows(self, name: str) -> bool:
        return False


def halves_apart(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of heads of `head_dim` from pairs of neighbours to pairs across the two halves."""
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
