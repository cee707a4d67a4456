"""Which axis each frequency of a rotation in time, height and width follows."""

import pytest

from quire.executor.layers.positions.rotary import rotary_axes


@pytest.mark.parametrize(
    ("settings", "axes"),
    [
        ({}, None),
        ({"mrope_section": [2, 3, 3]}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ({"mrope_section": [4, 2, 2], "mrope_interleaved": True}, [0, 1, 2, 0, 1, 2, 0, 0]),
        ({"mrope_section": [11, 11, 10], "mrope_interleaved": True}, [0, 1, 2, 0, 1, 2, 0, 1]),
    ],
)
def test_axes_of_frequencies(settings: dict[str, object], axes: list[int] | None) -> None:
    found = rotary_axes(settings, 8)
    assert (None if found is None else found.tolist()) == axes
