"""A class of the user's own: proposes drafts from the known tokens of requests.

The class is built with the engine's configuration, and has a method `propose` with vLLM's meaning:

    class MyDrafts:
        def __init__(self, config): ...
        def propose(self, token_ids: list[list[int]], most: int) -> list[list[int]]:
            '''The known tokens of each request, prompt and output; up to `most` drafts for each.'''

All ranks build one, and all must propose the same.
"""

import pkgutil
from typing import Any

import numpy as np
import torch

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens, Stateless
from quire.executor.transfers import to_device


class CustomClass(Stateless):
    """Asks the user's object. It reads the known tokens, so on an accelerator the launch waits for the step."""

    def __init__(self, proposer: Any, num_drafts: int, vocab_size: int) -> None:
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return ForwardReads()

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Refuses a class that cannot be imported, or has no `propose`."""
        assert config.speculation is not None
        _find(config.speculation.draft_class or "")

    @classmethod
    def build(cls, parts: MethodParts) -> "CustomClass":
        kind = _find(parts.speculation.draft_class or "")
        return cls(kind(parts.config), parts.speculation.num_tokens, parts.config.spec.vocab_size)

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        asked = np.flatnonzero(sampled.wants_drafts)
        if not len(asked):
            return Proposal.none(table.device)
        num_known = sampled.num_known.tolist()
        slots = sampled.slots[asked].tolist()
        rows = zip(asked.tolist(), slots, strict=True)
        known = [table.token_ids[slot, : num_known[row]].tolist() for row, slot in rows]
        proposed = self._proposer.propose(known, self._num_drafts)
        assert len(proposed) == len(asked), "propose returns a list of drafts for each request"
        token_ids = np.zeros((len(asked), self._num_drafts), np.int64)
        counts = np.zeros(len(asked), np.int64)
        for row, drafts in enumerate(proposed):
            valid = drafts[: self._num_drafts]
            wrong = next((i for i, token_id in enumerate(valid) if not 0 <= token_id < self._vocab_size), len(valid))
            counts[row] = 0 if table.num_unnamed[slots[row]] else wrong  # an id that is none ends the drafts
            token_ids[row, :wrong] = valid[:wrong]
        return Proposal(torch.from_numpy(token_ids).to(table.device), to_device(counts, table.device))


def _find(name: str) -> Any:
    try:
        kind = pkgutil.resolve_name(name if ":" in name else ":".join(name.rsplit(".", 1)))
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelLoadError(f"--speculative-config.model {name}: no such class can be imported ({error}).") from None
    if not callable(getattr(kind, "propose", None)):
        raise ModelLoadError(f"--speculative-config.model {name}: the class has no method propose.")
    return kind
