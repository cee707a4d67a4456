"""Attention of towers, in both directions: the function that their modules call."""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from quire.ops.backend import AttentionForm, Backend

LENGTHS = "cu_seq_lens_q"
"""The argument with the ends of the sequences in a row: those of images, and windows within them."""

_MORE = frozenset({"position_bias", "softcap", "sliding_window", "s_aux"})
"""Arguments of the library's functions that make attention more than products."""


class _Rotation(NamedTuple):
    """An image's cosines and sines, which are kept because their ids are keys, and what the backend takes."""

    cos: Tensor
    sin: Tensor
    factors: tuple[Tensor, Tensor]


class TowerAttention:
    """Computes calls without a mask by `Backend.sequence_attention`, and others as the library does.

    Attributes:
        whole: the name under which classes call it that hand over masks.
        cut: the name for classes that tell where sequences end in place of a mask, as they do for flash attention.
    """

    def __init__(self, ops: Backend, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._batches: dict[Any, Any] = {}  # of the item that is being encoded, by what tells the lengths
        self._ends: dict[int, Tensor] = {}  # keeps tensors that are keys by their id
        self._rotations: dict[tuple[int, int], _Rotation] = {}
        self.whole, self.cut = f"quire-tower-{id(self)}", f"quire-tower-flash-{id(self)}"

    def register(self, owner: object) -> None:
        """Lets classes call it by its names, until `owner` is gone."""
        for name, mask in ((self.whole, sdpa_mask), (self.cut, flash_attention_mask)):
            AttentionInterface.register(name, self)
            AttentionMaskInterface.register(name, mask)
            for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
                weakref.finalize(owner, mapping.pop, name)

    def forget(self) -> None:
        """Forgets the sequences of an item that has been encoded."""
        self._batches.clear()
        self._ends.clear()
        self._rotations.clear()

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attends from `query` [n, heads, num_tokens, size], keys and values alike, to [n, num_tokens, heads, size of
        values].
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if not _is_plain(module, query, key, attention_mask, given):
            return as_the_library(module, query, key, value, attention_mask, **given), None
        num_rows, num_heads, num_tokens, size = query.shape
        width = max(size, value.shape[3])
        parts = [_as_wide(x.transpose(1, 2).flatten(0, 1), width) for x in (query, key, value)]
        out = self._ops.sequence_attention(
            torch.cat(parts, dim=1), key.shape[1], self.batch(num_rows, num_tokens, given.get(LENGTHS)),
            AttentionForm(float(given.get("scaling", size**-0.5))),
        )  # fmt: skip
        return out[..., : value.shape[3]].reshape(num_rows, num_tokens, num_heads, -1), None

    def rotation(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns `Backend.rotary`'s factors of an image's places; `cos` and `sin` are [num_tokens, size]."""
        found = self._rotations.get((id(cos), id(sin)))
        if found is None:
            signs = torch.ones(cos.shape[1], device=cos.device)
            signs[: cos.shape[1] // 2] = -1
            found = _Rotation(cos, sin, (cos.to(dtype).unsqueeze(1), (sin * signs).to(dtype).unsqueeze(1)))
            self._rotations[id(cos), id(sin)] = found
        return found.factors

    def batch(self, num_rows: int, num_tokens: int, ends: Tensor | None) -> Any:
        """Prepares the sequences of a call: `num_rows` of `num_tokens`, or those that end where `ends` says."""
        name = (num_rows, num_tokens) if ends is None else id(ends)
        batch = self._batches.get(name)
        if batch is None:
            if ends is None:
                lengths = np.full(num_rows, num_tokens)
            else:
                self._ends[id(ends)] = ends
                lengths = np.diff(ends.cpu().numpy())
            batch = self._batches[name] = self._ops.sequence_batch(lengths[lengths > 0], self._device)
        return batch


def _as_wide(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x


def as_the_library(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
) -> Tensor:
    """Attends by torch's function, sequence by sequence where the class tells their ends."""
    ends = arguments.pop(LENGTHS, None)
    if mask is not None and mask.dim() == 2:  # the tokens that are no padding
        mask = mask[:, None, None].bool()
    if ends is None:
        return sdpa_attention_forward(module, query, key, value, mask, **arguments)[0]
    lengths = ends.diff().tolist()
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, mask, **arguments)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1)


def _is_plain(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, given: Mapping[str, Any]) -> bool:
    """Returns True for attention of all tokens of a sequence to each other, by products alone."""
    is_causal = given.get("is_causal", getattr(module, "is_causal", True))
    is_whole = query.shape[2] == key.shape[2] and query.dtype == key.dtype
    return is_whole and mask is None and not is_causal and not given.keys() & _MORE
