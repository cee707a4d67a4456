"""Grammars of the requests in the slots: makes a mask of the tokens that may come next, in each step.

A grammar is loaded in a thread while the request's prompt is computed. Masks are made by the thread that runs the step:
an accelerator is still at its forward pass then, and on a CPU a microsecond or two a row is less than any hand-over. A
chosen token is looked up in its mask; its matcher goes forward just before the next mask, when it is at work anyway.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from quire.core.logging import get_logger
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.feature import FollowingMask, SampleBatch
from quire.executor.sampling.grammar.library import GrammarLibrary
from quire.executor.sampling.grammar.matcher import Matcher, MatcherError
from quire.ops.backend import Backend

logger = get_logger(__name__)


class DeadEnd(NamedTuple):
    """Why a grammar lets an output neither end nor go on."""

    message: str


class GrammarMasks(FollowingMask):
    """Keeps a matcher for each slot that has a grammar.

    Each rank has its own matchers. They agree because ranks come to the same tokens.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Collection[int], ops: Backend) -> None:
        self._ops = ops.sampling
        self._eos_token_ids = frozenset(eos_token_ids)
        self._active = np.zeros(max_num_seqs, bool)
        self._num_words = -(-vocab_size // 32)
        self._loading: dict[int, Future[Matcher]] = {}  # by slot
        self._matchers: dict[int, Matcher] = {}  # by slot; since the first mask
        self._faults: dict[int, str] = {}  # by slot; why there is no mask
        self._stuck: set[int] = set()  # slots whose last mask allowed nothing
        self._chosen: dict[int, int] = {}  # by slot; the token that its matcher has not accepted yet
        self._bitmask = np.zeros((0, self._num_words), np.int32)  # of the step that is under way
        self._masked: dict[int, int] = {}  # slot to row of the bitmask
        self._library = GrammarLibrary()
        # One thread, so that the work for a slot is done in the order of submission.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    # ------------------------------------------------------------------------------------------------- slots

    def admit(self, request: NewSlot) -> bool:
        """Starts to load a request's grammar, and to advance its matcher past the output so far."""
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
        self._faults.pop(slot, None)
        self._stuck.discard(slot)
        self._let_go(slot)

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

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        """Leaves only tokens that the grammars allow."""
        slots = batch.slots.tolist()
        self._bitmask = self._fill(slots)
        self._masked = {slot: row for row, slot in enumerate(slots)}
        self._ops.apply_bitmask(logits, rows, self._bitmask)

    def _fill(self, slots: list[int]) -> np.ndarray:
        """[num_rows, num_words] int32; zeros, which allow nothing, where a matcher failed."""
        bitmask = np.zeros((len(slots), self._num_words), np.int32)
        together: dict[type[Matcher], tuple[list[Matcher], list[int]]] = {}  # by library: matchers and their rows
        for row, slot in enumerate(slots):
            if (matcher := self._matcher(slot)) is not None:
                matchers, rows = together.setdefault(type(matcher), ([], []))
                matchers.append(matcher)
                rows.append(row)
        for library, (matchers, rows) in together.items():
            try:
                library.fill_all(matchers, bitmask, rows)
            except Exception:  # a library's error about one grammar: filled one by one, the others succeed
                for matcher, row in zip(matchers, rows, strict=True):
                    self._fill_row(bitmask, row, matcher, slots[row])
        return bitmask

    def _fill_row(self, bitmask: np.ndarray, row: int, matcher: Matcher, slot: int) -> None:
        try:
            matcher.fill(bitmask, row)
        except Exception as error:
            self._blame(slot, error)
            bitmask[row] = 0

    def _matcher(self, slot: int) -> Matcher | None:
        """The matcher of a request, advanced past all known tokens; None if it failed."""
        matcher, token_id = self._matchers.get(slot), self._chosen.pop(slot, None)
        try:
            if matcher is None and slot not in self._faults:
                matcher = self._matchers[slot] = self._loading[slot].result()
            elif matcher is not None and token_id is not None and not matcher.accept(token_id):
                raise MatcherError("the library refuses a token that it allowed")
        except Exception as error:  # a library's, as above
            self._blame(slot, error)
            return None
        return matcher

    def _blame(self, slot: int, error: Exception) -> None:
        if not isinstance(error, MatcherError):
            logger.error("the grammar of a request cannot be used", exc_info=error)
        self._faults[slot] = f"{error or type(error).__name__}"

    def advance(self, slots: np.ndarray, token_ids: list[int], usable: list[bool]) -> list[int]:
        """See `FollowingMask.advance`. Compares the tokens of the last step with masks against those masks.

        A request whose output is complete is held to nothing from then on: later tokens are dropped by the scheduler,
        or are what `ignore_eos` asked for.
        """
        broken: list[int] = []
        if not self._masked:
            return broken
        for row, (slot, token_id, is_usable) in enumerate(zip(slots.tolist(), token_ids, usable, strict=True)):
            if (place := self._masked.get(slot)) is None:
                continue
            if is_usable and not self._bitmask.item(place, token_id // 32) >> token_id % 32 & 1:
                broken.append(row)
                self._let_go(slot)
            elif not is_usable or token_id in self._eos_token_ids:
                if not self._bitmask[place].any():
                    self._stuck.add(slot)
                self._let_go(slot)
            else:
                self._chosen[slot] = token_id
        self._masked = {}
        return broken

    def _let_go(self, slot: int) -> None:
        """Stops masking a request's tokens."""
        self._matchers.pop(slot, None)
        self._chosen.pop(slot, None)
        self._active[slot] = False

    def why_nothing_fits(self, slot: int, *, has_other_limits: bool) -> DeadEnd | None:
        """Says how the grammar of a request left no token; None if it did not.

        Args:
            has_other_limits: other features may have taken away the tokens that the grammar allowed.
        """
        if slot in self._faults:
            return DeadEnd(f"The grammar of structured_outputs cannot be followed here: {self._faults[slot]}.")
        if slot in self._stuck:
            return DeadEnd("The grammar of structured_outputs allows neither a token nor the end here.")
        if slot in self._loading and has_other_limits:
            return DeadEnd(
                "No token fits both structured_outputs and the request's other limits on tokens "
                "(min_tokens, allowed_token_ids, bad_words); loosen one of them."
            )
        return None
