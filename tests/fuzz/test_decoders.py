"""Decoders of bytes of others: they refuse what is wrong by the errors that are meant for that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.decoders import DECODERS, SEEDS
from tests.fuzz.examples import fuzzed, mutated


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    @fuzzed(60)
    @given(st.one_of(st.binary(max_size=60), st.sampled_from(SEEDS[name]).flatmap(mutated)))
    def run(data: bytes) -> None:
        DECODERS[name](data)

    for seed in SEEDS[name]:
        DECODERS[name](seed)
    run()
