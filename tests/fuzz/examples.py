"""The number of examples, and strategies that several tests share."""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

WANTED = os.environ.get("QUIRE_FUZZ_EXAMPLES")


def fuzzed(num_examples: int) -> settings:
    """So many examples, the same in each run of the suite; or those that `scripts/chaos fuzz` wants."""
    return settings(
        max_examples=int(WANTED) if WANTED else num_examples,
        derandomize=WANTED is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


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
