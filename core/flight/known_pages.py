"""The slots and pages whose content a replay has computed; a recording may begin in the middle of an engine's life."""

from msgspec.structs import replace

from quire.core.wire.protocol import KVGroups, NewSlot, StepPlan


class KnownPages:
    """Leaves out of plans what depends on steps before the recording: running requests, and prefixes in the cache.

    A row's result depends on no other row, so the rows that stay bring the same tokens.

    Args:
        is_whole: the recording has all steps, so that everything is known.
    """

    def __init__(self, kv_groups: KVGroups, block_size: int, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._keeps_states = any(group.is_recurrent for group in kv_groups)
        self._block_size = block_size
        self._tables: dict[int, list[list[int]]] = {}  # of known slots, the pages of each KV group
        self._written: set[tuple[int, int]] = set()  # (KV group, page)

    def known_part(self, plan: StepPlan) -> tuple[StepPlan, list[int]]:
        """The plan without unknown rows, and the indices of the rows that stay."""
        if self._is_whole:
            return plan, list(range(len(plan.slots)))
        for slot in plan.released:
            self._tables.pop(slot, None)
        starts = dict(zip(plan.slots, plan.num_computed, strict=True))
        admitted = [new for new in plan.admitted if self._admit(new, starts.get(new.slot, 0))]
        for slot, pages in plan.appended_pages:
            self._append(slot, pages)
        rows = [row for row, slot in enumerate(plan.slots) if slot in self._tables]
        for row in rows:
            self._write(plan.slots[row], plan.num_computed[row], plan.num_scheduled[row])
        places = {row: place for place, row in enumerate(rows)}
        sampling = [row for row, wanted in enumerate(plan.num_wanted) if wanted]
        limits = plan.draft_limits and [
            limit for row, limit in zip(sampling, plan.draft_limits, strict=True) if row in places
        ]
        return (
            replace(
                plan,
                admitted=admitted,
                slots=[plan.slots[row] for row in rows],
                num_computed=[plan.num_computed[row] for row in rows],
                num_scheduled=[plan.num_scheduled[row] for row in rows],
                num_wanted=[plan.num_wanted[row] for row in rows],
                appended_pages=[each for each in plan.appended_pages if each[0] in self._tables],
                sampled=[(places[row], token) for row, token in plan.sampled if row in places],
                outputs=[(places[row], kind) for row, kind in plan.outputs if row in places],
                draft_limits=limits,
            ),
            rows,
        )

    def _admit(self, new: NewSlot, start: int) -> bool:
        """Returns True if the slot's request begins with tokens that are computed here, or with known pages."""
        num_before = start // self._block_size
        is_known = start == 0 or (
            not self._keeps_states
            and all(
                (group, page) in self._written
                for group, pages in enumerate(new.page_ids)
                for page in pages[:num_before]
            )
        )
        fresh = [pages[num_before:] for pages in new.page_ids]
        self._forget(fresh)
        if is_known:
            self._tables[new.slot] = [list(pages) for pages in new.page_ids]
        return is_known

    def _append(self, slot: int, pages: list[list[int]]) -> None:
        self._forget(pages)
        if slot in self._tables:
            for table, more in zip(self._tables[slot], pages, strict=True):
                table += more

    def _forget(self, pages: list[list[int]]) -> None:
        """These pages get another content, perhaps of a request that is left out."""
        self._written.difference_update((group, page) for group, each in enumerate(pages) for page in each)

    def _write(self, slot: int, start: int, count: int) -> None:
        first, last = start // self._block_size, (start + count - 1) // self._block_size
        for group, table in enumerate(self._tables[slot]):
            self._written.update((group, page) for page in table[first : last + 1])
