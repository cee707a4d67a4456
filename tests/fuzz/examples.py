"""The number of examples, and strategies that several tests share."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("QUIRE_FUZZ_SECONDS", "0"))
"""The time of each test; 0: the suite's few examples."""
COUNTS = os.environ.get("QUIRE_FUZZ_COUNTS")
"""A file for lines of a test's name, its number of examples and its seconds."""

_ROUND = 200


def fuzzed(num_examples: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A test with so many examples, the same in each run of the suite; or with new ones, for the time that
    `scripts/fuzz` gives it."""
    if SECONDS:
        return _for_a_time
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def _for_a_time(test: Any) -> Callable[[], None]:
    inner, count = test.hypothesis.inner_test, 0

    @functools.wraps(inner)
    def counted(*args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        inner(*args, **options)

    test.hypothesis.inner_test = counted
    round_of_examples = settings(
        max_examples=_ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )(test)

    def run() -> None:
        started = time.monotonic()
        try:
            while time.monotonic() - started < SECONDS:
                round_of_examples()
        finally:
            if COUNTS:
                name = os.environ.get("PYTEST_CURRENT_TEST", inner.__qualname__).partition(" ")[0]
                with Path(COUNTS).open("a") as file:
                    file.write(f"{name}\t{count}\t{time.monotonic() - started:.1f}\n")

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.sampled_from([0, -1, 2**31, 2**53, 10**9]), st.floats(allow_nan=False)
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some bytes changed, cut or added."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        match draw(st.integers(0, 2)):
            case 0 if changed:
                changed[at] = draw(st.integers(0, 255))
            case 1:
                del changed[at : at + draw(st.integers(1, 8))]
            case _:
                changed[at:at] = draw(st.binary(max_size=8))
    return bytes(changed)


@st.composite
def altered(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with some fields of another value, gone or added, at any depth."""
    copy = dict(body)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*copy, "x"]) if copy else st.just("x"))
        inner = copy.get(name)
        if isinstance(inner, dict) and draw(st.booleans()):
            copy[name] = draw(altered(inner))
        elif draw(st.integers(0, 4)) == 0:
            copy.pop(name, None)
        else:
            copy[name] = draw(JSON)
    return copy
