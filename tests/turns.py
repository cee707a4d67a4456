"""Takes families in turns: of many cases that prove the same of as many families, a run of the suite has a share.

A test with `@pytest.mark.turns(4)` has its cases divided into four shares. `--turn NUMBER` chooses one of them, another
one for each of four numbers in a row; without the option all cases run.
"""

import zlib
from collections import defaultdict

import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.getgroup("suite").addoption(
        "--turn", type=int, metavar="NUMBER", help="run one share of the cases of tests that are marked with `turns`"
    )


def register(config: pytest.Config) -> None:
    """Declares the mark."""
    config.addinivalue_line("markers", "turns(num_shares): with --turn, only one share of the test's cases runs")


def leave_out(items: list[pytest.Item], config: pytest.Config) -> None:
    """Removes the cases of other turns from `items`, in place."""
    turn = config.getoption("--turn")
    if turn is None:
        return
    families = defaultdict(list)
    for item in items:
        if item.get_closest_marker("turns") is not None:
            families[item.nodeid.partition("[")[0]].append(item)
    others = {id(item) for family in families.values() for item in _of_other_turns(family, turn)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
    items[:] = [item for item in items if id(item) not in others]


def _of_other_turns(family: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """The cases of one test that are not in the share of `turn`.

    A hash of its parameters' names places a case. So a share has values of all parameters, and tests with the same
    parameters, which may have fixtures in common, have the same shares.
    """
    mark = family[0].get_closest_marker("turns")
    assert mark is not None
    num_shares = min(mark.args[0], len(family))
    shuffled = sorted(family, key=lambda item: zlib.crc32(item.nodeid.partition("[")[2].encode()))
    return [item for place, item in enumerate(shuffled) if place % num_shares != turn % num_shares]
