"""The names that llama.cpp gives to tensors in GGUF files, and what it does to some of them."""

import re
from collections.abc import Container

from torch import Tensor

from quire.executor.weights.names import halves_apart

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
_MEMBER = re.compile(r"(_exps)\.\d+")
_ROTATED = re.compile(r"self_attn\.[qk]_proj\.")
_NORM = re.compile(r"norm\.weight$")
_CORRECTION = "e_score_correction_bias"
"""Of a router; in files it is a bias, as it is called in `gguf`."""
_TURNS_NEIGHBOURS = ("llama", "granite", "granitemoe")
"""Architectures whose files have the rows of queries and keys in another order than the hub."""
_ADDS_ONE = ("gemma", "gemma2", "gemma3")
"""Architectures whose files have 1 added to the weights of norms."""


class GgufNames:
    """See `Names`. The table of names is that of llama.cpp's own converter, in the `gguf` package."""

    def __init__(self, architecture: str, num_layers: int, head_dim: int) -> None:
        import gguf  # optional, and only such files need it

        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        self._map = gguf.get_tensor_name_map(kind, num_layers)
        self._head_dim = head_dim
        self._turns_neighbours = architecture in _TURNS_NEIGHBOURS
        self._adds_one = architecture in _ADDS_ONE

    def find(self, name: str, present: Container[str]) -> str | None:
        """See `Names.find`."""
        stored = self.stored_name(name)
        return stored if stored is not None and stored in present else None

    def stored_name(self, name: str) -> str | None:
        """The name in files of what models call `name`. One expert of a stack has its number before the last dot."""
        if name.endswith(_CORRECTION):
            name = name.replace(_CORRECTION, "e_score_correction.bias")
        elif name.endswith(".sinks"):
            name += ".weight"
        expert = _EXPERT.fullmatch(name)
        whole = name if expert is None else expert[1] + expert[3]
        stored = self._map.get_name(whole, try_suffixes=(".weight", ".bias"))
        if stored is None or expert is None:
            return stored
        stem, _, kind = stored.rpartition(".")
        return f"{stem}.{expert[2]}.{kind}"

    def arrange(self, name: str, tensor: Tensor) -> Tensor:
        """See `Names.arrange`; blocks of bytes may stand for the numbers of a row."""
        if self._turns_neighbours and _ROTATED.search(name):
            return halves_apart(tensor, self._head_dim)
        if self._adds_one and _NORM.search(name):
            return tensor - 1
        return tensor


def without_expert(stored: str) -> str:
    """The name of the stack that holds the expert called `stored`; other names are their own."""
    return _MEMBER.sub(r"\1", stored)
