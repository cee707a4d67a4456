"""Finds the layers of a class that may take adapters: those that see one row for each token of a step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quire.executor.layers.adapters import Adapters, LayerAdapters
from quire.executor.models.transformers.layer_modules import LayerModule


def check_rows(place: Adapters, modules: Iterable[nn.Module], num_tokens: int, run: Callable[[], None]) -> None:
    """Calls `run`, a step of `num_tokens` without adapters, and lets layers that saw other rows take none.

    A class may call a layer for some tokens alone, as an expert, or for several rows of a token. Then a row does not
    tell which token's adapter it has. An adapter with weights for such a layer is refused later, as for any other layer
    without a place.
    """
    adapted = [module for module in modules if isinstance(module, LayerModule) and module.adapters]
    fits: set[LayerAdapters] = set()
    others: set[LayerAdapters] = set()

    def note(module: LayerModule, args: tuple[Any, ...]) -> None:
        is_fit = bool(args) and isinstance(args[0], Tensor) and place.sees(module.num_rows(args[0]))
        (fits if is_fit else others).update(module.adapters)

    hooks = [module.register_forward_pre_hook(note) for module in adapted]
    place.enter_step(torch.full((num_tokens,), -1, dtype=place.index_dtype))
    try:
        run()
    finally:
        place.enter_step(None)
        for hook in hooks:
            hook.remove()
    place.leave_out(adapters_of(adapted) - (fits - others))


def adapters_of(modules: Iterable[nn.Module]) -> set[LayerAdapters]:
    """Returns the places of adapters that some modules have."""
    return {each for module in modules if isinstance(module, LayerModule) for each in module.adapters}
