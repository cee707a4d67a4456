"""Whose question a helper answers next: keys take turns, and no key has all helpers."""

import pytest

from quire.core.errors import OverloadedError
from quire.frontend.helpers.turns import MAX_WAITING_BYTES, Ticket, Turns
from quire.frontend.http.errors import describe

LARGE = 100_000


class Helpers:
    """Helpers that each take a second for any question."""

    def __init__(self, count: int) -> None:
        self.turns = Turns(count)
        self.busy: list[tuple[float, Ticket]] = []
        self.now = 0.0
        self._count = count

    def ask(self, owner: str, num_bytes: int = 10) -> None:
        self.turns.enter(self.now, num_bytes, owner, self.busy)

    def start(self) -> list[str]:
        """Gives idle helpers their next questions; returns whose these are."""
        begun = []
        while len(self.busy) < self._count and (ticket := self.turns.next(self.now, self.busy)) is not None:
            self.turns.leave(ticket)
            self.turns.begin(ticket)
            self.busy.append((self.now, ticket))
            begun.append(ticket.owner)
        return begun

    def finish(self) -> None:
        self.now += 1
        for _, ticket in self.busy:
            self.turns.end(ticket, 1.0)
        self.busy.clear()


@pytest.mark.parametrize("num_bytes", [10, LARGE])
def test_a_key_with_many_questions_leaves_a_helper_to_others(num_bytes: int) -> None:
    helpers = Helpers(4)
    for _ in range(64):
        helpers.ask("many", num_bytes)
    assert helpers.start() == ["many"] * 3
    helpers.ask("one")
    assert helpers.start() == ["one"]


def test_keys_take_turns_by_the_time_that_helpers_worked_for_them() -> None:
    helpers = Helpers(1)
    for _ in range(9):
        helpers.ask("many")
    begun = helpers.start()
    helpers.finish()
    for _ in range(3):
        helpers.ask("few")
    for _ in range(11):
        begun += helpers.start()
        helpers.finish()
    assert begun[:7] == ["many", "few", "many", "few", "many", "few", "many"]
    assert begun[7:] == ["many"] * 5
    helpers.ask("many")
    helpers.ask("few")  # which asked for nothing meanwhile, and has saved up no turns
    assert helpers.start() == ["few"]
    helpers.finish()
    helpers.ask("few")
    assert helpers.start() == ["many"]


def test_without_keys_one_helper_is_left_to_small_questions_alone() -> None:
    helpers = Helpers(4)
    for _ in range(64):
        helpers.ask("", LARGE)
    assert len(helpers.start()) == 3
    helpers.ask("")
    assert len(helpers.start()) == 1
    helpers.finish()
    for _ in range(4):
        helpers.ask("")
    assert helpers.start() == [""] * 4
    assert all(ticket.is_small for _, ticket in helpers.busy)


def test_what_waits_for_one_key_is_bounded_in_bytes() -> None:
    helpers = Helpers(1)
    for _ in range(4):
        helpers.ask("a", MAX_WAITING_BYTES // 4)
    with pytest.raises(OverloadedError, match="waits for its helper processes") as caught:
        helpers.ask("a")
    assert describe(caught.value).status == 429
    helpers.ask("b", MAX_WAITING_BYTES)
    assert helpers.start() == ["a"]
    helpers.ask("a")
