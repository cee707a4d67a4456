"""Turns: each case of a marked test runs in one of them, and all other tests in each."""

import pytest

from tests.turns import add_options, register

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

def test_other(): pass
"""


def names(pytester: pytest.Pytester, *options: str) -> list[str]:
    listed = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
    return [line.partition("::")[2] for line in listed if "::" in line]


def test_every_case_has_its_turn(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    whole = names(pytester)
    assert len(whole) == 60 + 3 + 1
    shares = [names(pytester, f"--turn={number}") for number in range(70, 74)]
    assert {name for share in shares for name in share} == set(whole)
    for share in shares:
        assert share[-1] == "test_other"
        family = [name for name in share if "test_family" in name]
        assert len(family) == 15
        assert {name.split("-")[-1] for name in family} == {"bfloat16]", "float16]"}, "not one parameter a turn"
        assert sum("small" in name for name in share) == 1
