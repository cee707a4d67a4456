"""The grammars of the requests in the workers' slots. Each is sent to the workers once while a slot uses it.

Both ends of the plan ring have a `SlotGrammars`. They see the same plans, so the receiver has each grammar that the
sender leaves out.
"""

from collections import Counter

from msgspec.structs import replace

from quire.core.wire.protocol import Grammar, NewSlot, StepPlan


class SlotGrammars:
    """The grammar of each slot, as of the last plan."""

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}  # by slot
        self._num_slots: Counter[bytes] = Counter()  # by key
        self._grammars: dict[bytes, Grammar] = {}  # by key

    def without_known(self, plan: StepPlan) -> StepPlan:
        """Returns `plan` without the data of grammars that the workers have. The caller must send the returned plan."""
        self._release(plan.released)
        if not any(new.grammar for new in plan.admitted):
            return plan
        return replace(plan, admitted=[self._without_known(new) for new in plan.admitted])

    def complete(self, plan: StepPlan) -> None:
        """Puts the grammars that the sender left out into a received plan."""
        self._release(plan.released)
        for new in plan.admitted:
            if new.grammar is not None:
                new.grammar = self._hold(new.slot, new.grammar)

    def _without_known(self, new: NewSlot) -> NewSlot:
        if new.grammar is None:
            return new
        is_known = new.grammar.key in self._grammars
        self._hold(new.slot, new.grammar)
        return replace(new, grammar=replace(new.grammar, data=b"")) if is_known else new

    def _hold(self, slot: int, grammar: Grammar) -> Grammar:
        """Records the grammar of a slot; returns the grammar with its data, as first sent."""
        self._keys[slot] = grammar.key
        self._num_slots[grammar.key] += 1
        return self._grammars.setdefault(grammar.key, grammar)

    def _release(self, slots: list[int]) -> None:
        if not self._keys:
            return
        for slot in slots:
            key = self._keys.pop(slot, None)
            if key is None:
                continue
            self._num_slots[key] -= 1
            if not self._num_slots[key]:
                del self._num_slots[key], self._grammars[key]
