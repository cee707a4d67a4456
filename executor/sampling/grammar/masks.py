"""Grammars of the requests in the slots: builds a mask of the allowed next tokens in each step.

A grammar is loaded in a thread while the request's prompt is computed. The thread that runs the step builds the masks:
an accelerator is still busy with its forward pass, and on a CPU one or two microseconds a row are less than the switch
to another thread. A chosen token is looked up in its mask; its matcher advances just before the next mask.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from quire.core.logging import get_logger
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.grammar.library import GrammarLibrary
from quire.executor.sampling.grammar.matcher import Matcher, MatcherError
from quire.executor.sampling.sampling_feature import FollowingMask, SampleBatch, drafts_between
from quire.ops.backend import Backend

logger = get_logger(__name__)

_MANY = 64
"""More tokens than these are no beginnings of one text."""


_MOST_TEXTS = 512
"""Masks of a request whose forced tokens are remembered."""


class _Forced(NamedTuple):
    """What a grammar forces after a request's known tokens.

    Attributes:
        token_ids: one after the other.
        masks: [1 + tokens that do not end the output, num_words] int32; that of the next token, and those along them.
    """

    token_ids: list[int]
    masks: np.ndarray


class DeadEnd(NamedTuple):
    """Why a grammar lets an output neither end nor continue."""

    message: str


class GrammarMasks(FollowingMask):
    """Holds a matcher for each slot that has a grammar.

    Each rank has its own matchers. They agree because all ranks get the same tokens.
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
        self._chosen: dict[int, list[int]] = {}  # by slot; the tokens that its matcher has not accepted yet
        self._drafts: dict[int, list[int]] = {}  # by slot; of the current step
        self._forced: dict[int, _Forced] = {}  # by slot; where it is known already
        self._texts: dict[int, dict[tuple[bytes, bytes], int | None]] = {}  # by slot; the forced tokens of masks
        self._masked: dict[int, np.ndarray] = {}  # by slot; of the current step, the masks from its next token on
        self._pieces: dict[int, Sequence[bytes]] = {}  # by slot; the text of each token
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
        if self._eos_token_ids.intersection(output):  # complete; it continues because of `ignore_eos`
            return False
        self._loading[request.slot] = self._thread.submit(self._start, request, output)
        self._active[request.slot] = True
        return True

    def release(self, slots: list[int]) -> None:
        """Drops requests that left their slots."""
        if self._loading:
            for slot in slots:
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._loading.pop(slot, None)
        self._faults.pop(slot, None)
        self._stuck.discard(slot)
        self._unmask(slot)
        self._pieces.pop(slot, None)
        self._texts.pop(slot, None)

    def _start(self, request: NewSlot, output: list[int]) -> Matcher:
        assert request.grammar is not None
        matcher = self._library.matcher(request.grammar)
        self._pieces[request.slot] = self._library.pieces(request.grammar)
        for token_id in output:
            if not matcher.accept(token_id):
                raise MatcherError("an earlier engine's output does not match the grammar")
        return matcher

    # ------------------------------------------------------------------------------------------------- a step

    def used(self, batch: SampleBatch) -> np.ndarray:
        """Rows with a grammar that is not complete."""
        return self._active[batch.slots]

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        """Leaves only the tokens that the grammars allow. A step may come in parts, and a part again."""
        slots = batch.slots.tolist()
        drafts = drafts_between(batch)
        self._drafts |= drafts
        bitmask = self._fill(slots)
        rows_of = reversed([*enumerate(slots)]) if drafts else enumerate(slots)  # so that a slot's first row stays
        self._masked |= {slot: bitmask[row:] for row, slot in rows_of}
        self._ops.apply_bitmask(logits, rows, bitmask)

    def _fill(self, slots: list[int]) -> np.ndarray:
        """[num_rows, num_words] int32; zeros, which allow nothing, where a matcher failed."""
        bitmask = np.zeros((len(slots), self._num_words), np.int32)
        by_library: dict[type[Matcher], tuple[list[Matcher], list[int]]] = {}  # by library: matchers and their rows
        before = -1
        for row, slot in enumerate(slots):
            if slot == before:
                continue
            before = slot
            if (matcher := self._matcher(slot)) is None:
                continue
            if slot in self._drafts:
                self._fill_rows(bitmask, row, matcher, slot)
            elif (known := self._forced.pop(slot, None)) is not None:
                bitmask[row] = known.masks[0]
            else:
                matchers, rows = by_library.setdefault(type(matcher), ([], []))
                matchers.append(matcher)
                rows.append(row)
        for library, (matchers, rows) in by_library.items():
            try:
                library.fill_all(matchers, bitmask, rows)
            except Exception:  # a library's error about one grammar: filled one by one, the others succeed
                for matcher, row in zip(matchers, rows, strict=True):
                    self._fill_row(bitmask, row, matcher, slots[row])
        return bitmask

    def _fill_rows(self, bitmask: np.ndarray, row: int, matcher: Matcher, slot: int) -> None:
        """Fills the masks of a request's rows from `row` on, along its drafts, and goes back.

        A draft that is forbidden, or ends the output, is the last that counts: what follows it is not masked.
        """
        drafts, num_accepted = self._drafts[slot], 0
        bitmask[row + 1 : row + 1 + len(drafts)] = -1
        known = self._forced.pop(slot, None)
        if known is not None and drafts == known.token_ids[: len(drafts)]:
            masks = known.masks[: 1 + len(drafts)]
            bitmask[row : row + len(masks)] = masks
            return
        if known is None:
            self._fill_row(bitmask, row, matcher, slot)
        else:
            bitmask[row] = known.masks[0]
        try:
            for draft in drafts:
                allowed = bitmask.item(row + num_accepted, draft // 32) >> draft % 32 & 1
                if not allowed or draft in self._eos_token_ids or not matcher.accept(draft):
                    break
                num_accepted += 1
                matcher.fill(bitmask, row + num_accepted)
            if num_accepted:
                matcher.rollback(num_accepted)
        except Exception as error:  # a library's error: its request ends
            self._blame(slot, error)
            bitmask[row : row + 1 + len(drafts)] = 0

    def _fill_row(self, bitmask: np.ndarray, row: int, matcher: Matcher, slot: int) -> None:
        try:
            matcher.fill(bitmask, row)
        except Exception as error:
            self._blame(slot, error)
            bitmask[row] = 0

    def _matcher(self, slot: int) -> Matcher | None:
        """The matcher of a request, advanced past all known tokens; None if it failed."""
        matcher, chosen = self._matchers.get(slot), self._chosen.pop(slot, [])
        try:
            if matcher is None and slot not in self._faults:
                matcher = self._matchers[slot] = self._loading[slot].result()
            for token_id in chosen:
                if matcher is not None and not matcher.accept(token_id):
                    raise MatcherError("the library refuses a token that it allowed")
        except Exception as error:  # a library's error, as above
            self._blame(slot, error)
            return None
        return matcher

    def _blame(self, slot: int, error: Exception) -> None:
        if not isinstance(error, MatcherError):
            logger.error("the grammar of a request cannot be used", exc_info=error)
        self._faults[slot] = f"{error or type(error).__name__}"

    def advance(self, slots: np.ndarray, token_ids: list[int], usable: list[bool]) -> list[int]:
        """Checks the tokens of the last step against its masks.

        A request whose output is complete is not constrained any more: the scheduler drops later tokens, unless
        `ignore_eos` asked for them.
        """
        broken: list[int] = []
        if not self._masked:
            return broken
        for row, (slot, token_id, is_usable) in enumerate(zip(slots.tolist(), token_ids, usable, strict=True)):
            if (masks := self._masked.pop(slot, None)) is None:
                continue
            drafts = self._drafts.get(slot)
            if is_usable and not masks.item(0, token_id // 32) >> token_id % 32 & 1:
                broken.append(row)
                self._unmask(slot)
            elif not is_usable and slot in self._chosen:
                pass  # after a draft: the request samples here again
            elif not is_usable or token_id in self._eos_token_ids:
                if not masks[0].any():
                    self._stuck.add(slot)
                self._unmask(slot)
            else:
                self._chosen.setdefault(slot, []).append(token_id)
                if drafts and drafts.pop(0) == token_id:
                    self._masked[slot] = masks[1:]
        self._masked, self._drafts = {}, {}
        return broken

    # ------------------------------------------------------------------------------------------------- forced pieces

    def is_active(self, slot: int) -> bool:
        """Returns True if the request in `slot` has a grammar that is not complete."""
        return bool(self._active[slot])

    def forced(self, slot: int, most: int) -> list[int]:
        """Returns the tokens that must follow a request's known tokens, `most` at most.

        A grammar may force a text that several tokens begin. The longest of these is taken, which a tokenizer mostly
        takes as well.
        """
        if not self._active[slot] or (matcher := self._matcher(slot)) is None:
            return []
        found: list[int] = []
        masks = np.empty((most + 1, self._num_words), np.int32)
        num_accepted = 0
        try:
            while True:  # the mask after the last token as well, which the step that checks it needs
                matcher.fill(masks, num_accepted)
                token_id = self._forced_token(slot, masks[num_accepted]) if len(found) < most else None
                if token_id is None:
                    break
                found.append(token_id)
                if token_id in self._eos_token_ids or not matcher.accept(token_id):
                    break
                num_accepted += 1
            if num_accepted:
                matcher.rollback(num_accepted)
        except Exception as error:  # a library's error: its request ends
            self._blame(slot, error)
            return []
        self._forced[slot] = _Forced(found, masks[: num_accepted + 1])
        return found

    def _forced_token(self, slot: int, mask: np.ndarray) -> int | None:
        """Returns what `_longest` finds for a mask. An output mostly comes to the same few masks again and again."""
        if np.count_nonzero(mask) > _MANY:
            return None
        texts, places = self._texts.setdefault(slot, {}), np.flatnonzero(mask)
        key = places.tobytes(), mask[places].tobytes()  # few words; a whole mask has thousands
        if key not in texts:
            if len(texts) >= _MOST_TEXTS:
                texts.clear()
            texts[key] = self._longest(mask, self._pieces[slot])
        return texts[key]

    @staticmethod
    def _longest(mask: np.ndarray, pieces: Sequence[bytes]) -> int | None:
        """Returns the longest allowed token, if all others are beginnings of it; None: the text is not forced."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not 0 < len(allowed) <= _MANY or allowed[-1] >= len(pieces):
            return None
        longest = max(allowed.tolist(), key=lambda token_id: len(pieces[token_id]))
        text = pieces[longest]
        if len(allowed) > 1 and not all(pieces[each] and text.startswith(pieces[each]) for each in allowed.tolist()):
            return None
        return longest

    def _unmask(self, slot: int) -> None:
        """Stops masking a request's tokens."""
        self._matchers.pop(slot, None)
        self._chosen.pop(slot, None)
        self._forced.pop(slot, None)
        self._active[slot] = False

    def why_nothing_fits(self, slot: int, *, has_other_limits: bool) -> DeadEnd | None:
        """Explains how the grammar of a request left no token; None if it did not.

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
