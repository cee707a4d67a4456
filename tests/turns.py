"""Takes families in turns: of many cases that prove the same of as many families, a run of the suite has a share.

`--turn NUMBER` chooses one of a family's shares, another one for each of as many numbers in a row; without the option
all cases run. A family is

- a test with at least `MANY` cases: four shares;
- a test with `@pytest.mark.turns(8)`: so many shares, however few its cases are, and all in one with `turns(1)`;
- all tests, of any files, with `pytest.mark.turns(4, among="whole systems")`: each takes long by itself. The mark of a
  test counts before that of its file.

The first case of a family of many, which should be its commonest, runs in each turn.
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

MANY = 16
"""A test with so many cases takes turns without a mark."""
NUM_SHARES = 4
"""The shares of such a test."""


def add_options(parser: pytest.Parser) -> None:
    parser.getgroup("suite").addoption(
        "--turn", type=int, metavar="NUMBER", help="run one share of the cases of tests that take turns"
    )


def register(config: pytest.Config) -> None:
    """Declares the mark."""
    config.addinivalue_line(
        "markers", "turns(num_shares, among=None): with --turn, one share of the test's cases runs, or of a group's"
    )


def leave_out(items: list[pytest.Item], config: pytest.Config) -> None:
    """Removes the cases of other turns than the option's from `items`, in place."""
    turn = config.getoption("--turn")
    if turn is None:
        return
    others = {id(item) for item in of_other_turns(items, turn)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
    items[:] = [item for item in items if id(item) not in others]


def of_other_turns(items: Sequence[pytest.Item], turn: int) -> list[pytest.Item]:
    """The cases that are not in the share of `turn` of their family."""
    families: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[_family(item)].append(item)
    return [
        item
        for (_, num_shares), family in families.items()
        for item in _others(family, num_shares or (NUM_SHARES if len(family) >= MANY else 1), turn)
    ]


def _family(item: pytest.Item) -> tuple[str, int]:
    """The name of an item's family and the shares that its mark gives it; 0 without a mark."""
    test, mark = item.nodeid.partition("[")[0], item.get_closest_marker("turns")
    if mark is None:
        return test, 0
    return mark.kwargs.get("among") or test, mark.args[0]


def _others(family: Sequence[pytest.Item], num_shares: int, turn: int) -> list[pytest.Item]:
    """The cases of a family that are not in the share of `turn`.

    A hash of its parameters' names places a case. So a share has values of all parameters, and tests with the same
    parameters, which may have fixtures in common, have the same shares.
    """
    num_shares = min(num_shares, len(family))
    runs_first = len(family) >= max(2 * num_shares, MANY)
    rest = sorted(family[1:] if runs_first else family, key=lambda item: zlib.crc32(_name(item).encode()))
    return [item for place, item in enumerate(rest) if place % num_shares != turn % num_shares]


def _name(item: pytest.Item) -> str:
    """The names of a case's parameters, or that of a test without any."""
    test, _, parameters = item.nodeid.partition("[")
    return parameters or test
