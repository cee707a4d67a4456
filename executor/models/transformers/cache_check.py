"""Checks that a class's attention reads, in each call, only what that call stored before.

Over pages, each call of attention has a separate cache. A class may use its cache differently: for example, the passes
of a loop may see only what the last pass stored. Its results then depend on the steps in which the tokens come, and no
chunking of a prompt is the right one.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.core.errors import ModelLoadError
from quire.executor.models.transformers.experts import GATE_UP
from quire.executor.models.transformers.probe import Findings, runnable, use_attention
from quire.executor.models.transformers.row_by_row import dry_cache, run_row
from quire.executor.models.transformers.skeleton import takes

_TOKEN_IDS = (5, 9, 6)
_NUM_BEFORE = 2  # tokens of the first step
_TOLERANCE = 1e-3


def check_cached_attention(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Refuses a class whose attention sees other cached keys or values of a token than in the step that computed them.

    A class that takes no cache, or cannot run with one here, has no past except the sequence itself.

    Raises:
        ModelLoadError: its attention sees other ones.
    """
    try:
        whole, last = _Steps(model, backbone).run()
    except Exception:  # the code of a model may raise anything
        return
    if all(keys.shape[2] == 1 for keys, _ in last):
        return
    if len(whole) != len(last) or any(_differ(*pair) for pair in zip(whole, last, strict=True)):
        raise ModelLoadError("its attention sees other keys and values of a token in a later step than in the same")


Given = tuple[Tensor, Tensor]
"""The keys and values of one call, [1, heads, num_tokens, size] each."""


class _Steps:
    """Runs a backbone with parameters on the meta device on a few tokens, all at once and in two steps."""

    def __init__(self, model: PreTrainedModel, backbone: nn.Module) -> None:
        self._model = model
        self._backbone = backbone
        self._given: list[Given] = []

    def run(self) -> tuple[list[Given], list[Given]]:
        """Returns the keys and values of each attention call: with all tokens in one step, and in the last of two."""
        token_ids = torch.tensor([_TOKEN_IDS])
        with runnable(self._model, Findings(), {}, is_flat=False), contextlib.ExitStack() as undo:
            use_attention(self._model, self._attend, undo)
            for module in self._model.modules():
                if GATE_UP in module._parameters:  # skipped, because experts are most of the work and have no past
                    vars(module)["forward"] = _no_experts
                    undo.callback(vars(module).pop, "forward")
            whole = self._run(token_ids, 0, dry_cache(self._model.config))
            cache = dry_cache(self._model.config)
            self._run(token_ids[:, :_NUM_BEFORE], 0, cache)
            return whole, self._run(token_ids[:, _NUM_BEFORE:], _NUM_BEFORE, cache)

    def _run(self, token_ids: Tensor, first: int, cache: Any) -> list[Given]:
        self._given = []
        positions = torch.arange(first, first + token_ids.shape[1]).unsqueeze(0)
        run_row(self._backbone, token_ids, cache, positions if takes(self._backbone, "position_ids") else None)
        return self._given

    def _attend(self, _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
        """Returns each token's own value, so that the inputs of later layers differ only where their pasts do."""
        self._given.append((key.clone(), value.clone()))
        own = value[:, :, -query.shape[2] :]
        return own.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _no_experts(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns zeros instead of experts' outputs."""
    return torch.zeros_like(hidden)


def _differ(whole: Given, last: Given) -> bool:
    pairs = zip(whole, last, strict=True)
    return any(x.shape != y.shape or not bool((x - y).abs().max() <= _TOLERANCE * x.abs().max()) for x, y in pairs)
