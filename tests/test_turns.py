"""Turns: each case of a family runs in one of them, its first in all, and all other tests in each."""

from collections.abc import Iterable

import pytest

from tests.turns import add_options, of_other_turns, register

pytest_plugins = "pytester"

CONFTEST = f"""
from {add_options.__module__} import add_options as pytest_addoption
from {register.__module__} import leave_out, register as pytest_configure

def pytest_collection_modifyitems(config, items):
    leave_out(items, config)
"""
TESTS = """
import pytest

@pytest.mark.turns(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", range(30))
def test_family(case, dtype): pass

@pytest.mark.turns(4)
@pytest.mark.parametrize("case", range(3))
def test_small_family(case): pass

@pytest.mark.turns(8)
@pytest.mark.parametrize("case", range(33))
def test_slow_family(case): pass

@pytest.mark.parametrize("case", range(17))
def test_many_cases(case): pass

@pytest.mark.turns(1)
@pytest.mark.parametrize("case", range(17))
def test_all_of_many_cases(case): pass

@pytest.mark.parametrize("case", range(15))
def test_few_cases(case): pass

def test_other(): pass
"""
SYSTEMS = """
import pytest

pytestmark = pytest.mark.turns(4, among="whole systems")

def test_one(): pass

@pytest.mark.parametrize("case", range(3))
def test_three(case): pass

@pytest.mark.turns(1)
def test_that_counts(): pass
"""


def names(pytester: pytest.Pytester, turns: Iterable[int]) -> tuple[set[str], list[list[str]]]:
    """All tests, and those of each turn. Tests are collected once: a run in this process imports all plugins anew."""
    pytester.makeconftest(CONFTEST)
    items, _ = pytester.inline_genitems()
    shares = []
    for turn in turns:
        others = {id(item) for item in of_other_turns(items, turn)}
        shares.append([item.name for item in items if id(item) not in others])
    return {item.name for item in items}, shares


def num_of(test: str, names: list[str]) -> int:
    return sum(name.partition("[")[0] == test for name in names)


def test_every_case_has_its_turn(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    whole, shares = names(pytester, range(70, 78))
    assert len(whole) == 60 + 3 + 33 + 17 + 17 + 15 + 1
    assert {name for share in shares for name in share} == whole
    assert {name for share in shares[:4] for name in share} >= {name for name in whole if "slow" not in name}
    for share in shares:
        assert share[-1] == "test_other"
        family = [name for name in share if "test_family" in name]
        assert len(family) in (15, 16)
        assert {name.split("-")[-1] for name in family} == {"bfloat16]", "float16]"}, "not one parameter a turn"
        assert {"test_family[0-bfloat16]", "test_slow_family[0]", "test_many_cases[0]"} <= set(share)
        assert num_of("test_small_family", share) == 1
        assert num_of("test_slow_family", share) == 5
        assert num_of("test_many_cases", share) == 5
        assert num_of("test_all_of_many_cases", share) == 17
        assert num_of("test_few_cases", share) == 15


def test_tests_of_several_files_take_turns_among_each_other(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_a=SYSTEMS, test_b=SYSTEMS)
    _, shares = names(pytester, range(4))
    for share in shares:
        assert num_of("test_that_counts", share) == 2
        assert len(share) == 2 + 2
    assert sum(num_of("test_one", share) for share in shares) == 2
    assert sum(num_of("test_three", share) for share in shares) == 6


def test_a_run_has_the_turn_of_its_option(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess("--turn=70").assert_outcomes(passed=16 + 1 + 5 + 5 + 17 + 15 + 1, deselected=86)
