"""Grammars of the requests in the slots: masks before a token is chosen, one step forward after it.

A grammar is loaded in a thread while the request's prompt is computed. Masks are made by the thread that runs the step:
an accelerator is still at its forward pass then, and on a CPU a microsecond or two a row is less than any hand-over.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from quire.core.logging import get_logger
from quire.core.protocol import NewSlot
from quire.executor.sampling.feature import SampleBatch
from quire.executor.sampling.grammar.library import GrammarLibrary
from quire.executor.sampling.grammar.matcher import Matcher, MatcherError

logger = get_logger(__name__)


class GrammarMasks:
    """A sampling feature with a life beside the sampler: `advance` after the draw, `release` with the slot.

    With several ranks each has its own, and they agree because ranks come to the same tokens.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._active = np.zeros(max_num_seqs, bool)
        self._num_words = -(-vocab_size // 32)
        self._loading: dict[int, Future[Matcher]] = {}  # by slot
        self._matchers: dict[int, Matcher] = {}  # by slot; since the first mask
        self._faults: dict[int, str] = {}  # by slot; why there is no mask
        self._library = GrammarLibrary()
        # One thread: whatever it does for a slot happens in the order that it was asked for.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    # ------------------------------------------------------------------------------------------------- slots

    def admit(self, request: NewSlot) -> bool:
        """Starts to load a request's grammar, and to bring it to where its output is."""
        self._drop(request.slot)
        if request.grammar is None:
            return False
        output = request.token_ids[request.num_prompt_tokens :]
        if self._eos_token_ids.intersection(output):  # complete; it goes on because it ignores its end
            return False
        self._loading[request.slot] = self._thread.submit(self._start, request, output)
        self._active[request.slot] = True
        return True

    def release(self, slots: list[int]) -> None:
        """Forgets requests that left their slots."""
        if self._loading:
            for slot in slots:
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._loading.pop(slot, None)
        self._matchers.pop(slot, None)
        self._faults.pop(slot, None)
        self._active[slot] = False

    def _start(self, request: NewSlot, output: list[int]) -> Matcher:
        assert request.grammar is not None
        matcher = self._library.matcher(request.grammar)
        for token_id in output:
            if not matcher.accept(token_id):
                raise MatcherError("an earlier engine's output does not match the grammar")
        return matcher

    # ------------------------------------------------------------------------------------------------- a step

    def used(self, batch: SampleBatch) -> np.ndarray:
        """Rows with a grammar that is not complete."""
        return self._active[batch.slots]

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Leaves only tokens that the grammars allow."""
        from quire.executor.sampling.grammar.apply import apply_bitmask  # here: who needs no grammar imports no library

        bitmask = self._fill(batch.slots.tolist())
        return apply_bitmask(logits, torch.from_numpy(bitmask).to(logits.device, non_blocking=True))

    def _fill(self, slots: list[int]) -> np.ndarray:
        """[num_rows, num_words] int32; zeros, which allow nothing, where a matcher failed."""
        bitmask = np.zeros((len(slots), self._num_words), np.int32)
        for row, slot in enumerate(slots):
            try:
                matcher = self._matchers.get(slot)
                if matcher is None:
                    matcher = self._matchers[slot] = self._loading[slot].result()
                matcher.fill(bitmask, row)
            except Exception as error:  # a library's, about one request's grammar: the others go on
                if not isinstance(error, MatcherError):
                    logger.exception("the grammar of a request cannot be used")
                self._faults[slot] = f"{error or type(error).__name__}"
                bitmask[row] = 0
        return bitmask

    def advance(self, slots: np.ndarray, token_ids: list[int], usable: np.ndarray) -> list[int]:
        """Takes the tokens that were chosen for the rows of `slots` [num_rows] into account, where they are `usable`.

        A request whose output is complete is free from then on: what is sampled for it before its end is known to the
        scheduler is dropped, or is what `ignore_eos` asked for.

        Returns:
            Rows whose token does not fit their grammar, because something brought it back after the mask.
        """
        broken: list[int] = []
        if not self._loading:
            return broken
        for row in np.flatnonzero(self._active[slots]).tolist():
            slot, token_id = int(slots[row]), token_ids[row]
            if usable[row] and not self._matchers[slot].accept(token_id):
                broken.append(row)
            elif usable[row] and token_id not in self._eos_token_ids:
                continue
            self._active[slot] = False
        return broken

    def why_nothing_fits(self, slot: int) -> str | None:
        """What to tell a request with a grammar for which no token was left; None for one without."""
        if slot in self._faults:
            return f"The grammar of structured_outputs cannot be followed here: {self._faults[slot]}."
        if slot in self._loading:
            return (
                "No token fits both structured_outputs and the request's other limits on tokens "
                "(min_tokens, allowed_token_ids, bad_words, logit_bias); loosen one of them."
            )
        return None
