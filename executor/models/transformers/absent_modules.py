"""Modules that keep no weights: those of other pipeline stages, and those that text does not need."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class AbsentModule(nn.Module):
    """A module without weights: another stage has them, or text does not need them. It computes with zeros where the
    class's code needs a result of some shape.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that it is no submodule and its weights are not read
        if (first := next(module.parameters(), None)) is not None:  # classes ask any parameter for their own dtype
            self.number = nn.Parameter(torch.zeros((), dtype=first.dtype), requires_grad=False)
        self._apply(lambda zero: zero)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Applies `fn` to one element, and expands that to the shape of a whole weight."""
        for owner in self._module[0].modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    zero = fn(torch.zeros((), dtype=parameter.dtype))
                    owner._parameters[name] = nn.Parameter(zero.expand(parameter.shape), requires_grad=False)
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._module[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module[0](*args, **kwargs)


def leave_out_towers(model: PreTrainedModel, called: Container[nn.Module]) -> None:
    """Removes the weights of the `idle_modules`."""
    for module in list(idle_modules(model, called)):
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is module:
                    parent._modules[name] = AbsentModule(module)


def idle_modules(model: PreTrainedModel, called: Container[nn.Module]) -> Iterator[nn.Module]:
    """Yields `model`'s towers for images and audio: inner models that a dry run on text never called.

    The layers between such a tower and the text model belong to it.
    """
    for parent in list(model.modules()):
        idle = [child for child in parent.children() if not any(part in called for part in child.modules())]
        if any(isinstance(child, PreTrainedModel) for child in idle):
            yield from idle


def leave_out(model: nn.Module, part: nn.Module) -> AbsentModule:
    """Puts a module without weights in the place of a part of `model`, and returns it."""
    absent = AbsentModule(part)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is part:
                parent._modules[name] = absent
    return absent
