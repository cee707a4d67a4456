"""The head of an encoder's class: the class's code behind its hidden states."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.executor.layers.adapters import Adapters, without_tokens
from quire.executor.layers.context import ModelContext
from quire.executor.models.transformers.layer_modules import WholeLinear
from quire.executor.models.transformers.probe import sizes_of
from quire.executor.models.transformers.skeleton import first_tensor


class EncoderHead:
    """Runs the class's code behind its hidden states: [n, hidden] → [n, labels or vocabulary].

    Each row is a sequence of one token; the module whose output are the hidden states, `source`, returns them.
    """

    def __init__(
        self, model: PreTrainedModel, source: nn.Module, output: Any, adapters: Adapters | None, *, keeps_states: bool
    ) -> None:
        """Takes as `output` the result of `source` in a dry run. Its layers take no `adapters`."""
        self._model = model
        self._adapters = adapters
        self._output = output
        self._given: Tensor | None = None
        self._seen: Tensor | None = None
        plain = source.forward

        @functools.wraps(plain)  # with its signature, which tells what it takes
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return _with_first(self._output, self._given)
            result = plain(*args, **kwargs)
            if keeps_states:
                self._seen = first_tensor(result)
            return result

        vars(source)["forward"] = forward

    def __call__(self, hidden: Tensor) -> Tensor:
        if not len(hidden):
            return self(hidden.new_zeros(1, hidden.shape[1]))[:0]
        self._given = hidden.unsqueeze(1)
        try:
            token_ids = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
            with without_tokens(self._adapters):
                logits = self._model(input_ids=token_ids).logits
        finally:
            self._given = None
        return logits if logits.dim() == 2 else logits[:, 0]

    def take_states(self) -> Tensor:
        """Returns the hidden states of the last run of the whole class."""
        seen, self._seen = self._seen, None
        assert seen is not None
        return seen


def _with_first(output: Any, hidden: Tensor) -> Any:
    """Returns a module's result with `hidden` in the place of its first tensor."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    output = copy.copy(output)
    output[next(iter(output))] = hidden
    return output


def keep_precision(model: PreTrainedModel, context: ModelContext, module: nn.Module, name: str) -> None:
    """Makes a module of the head compute in float32, as other heads do: it is small, and makes what the client gets."""
    if type(module) is nn.Linear:
        parent, _, child = name.rpartition(".")
        num_inputs, num_outputs = sizes_of(module)
        has_bias = module.bias is not None

        def read() -> tuple[Tensor, Tensor | None]:
            bias = context.read(f"{name}.bias", (num_outputs,), dtype=torch.float32) if has_bias else None
            return context.read(f"{name}.weight", (num_outputs, num_inputs), dtype=torch.float32), bias

        model.get_submodule(parent)._modules[child] = WholeLinear(context, read)
        return
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point():
            module._parameters[key] = nn.Parameter(parameter.float(), requires_grad=False)
