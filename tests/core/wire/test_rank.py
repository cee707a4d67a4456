"""Ranks as they appear in logs, and which rank logs."""

import pytest

from quire.core.wire.rank import Layout, Rank


@pytest.mark.parametrize(
    ("rank", "text", "is_first"),
    [
        (Rank(), "tp0", True),
        (Rank(tensor=1), "tp1", False),
        (Rank(data=2), "dp2-tp0", True),
        (Rank(pipeline=1), "pp1-tp0", False),
        (Rank(prefill=1, tensor=2), "pcp1-tp2", False),
        (Rank(data=1, expert=2), "dp1-tp0-ep2", True),
        (Rank(data=1, pipeline=2, tensor=3, expert=4), "dp1-pp2-tp3-ep4", False),
    ],
    ids=str,
)
def test_a_rank_is_named_by_its_coordinates(rank: Rank, text: str, is_first: bool) -> None:
    assert (str(rank), rank.is_first) == (text, is_first)


def test_the_last_stage_reports() -> None:
    layout = Layout(pipeline=2, prefill=3, tensor=2)
    ranks = layout.ranks()
    assert [str(rank) for rank in ranks if layout.reports(rank)] == ["pp1-tp0"]
    assert len(set(ranks)) == layout.num_workers == 12
    assert [layout.number(rank) for rank in ranks] == list(range(layout.num_workers))
    assert Layout().reports(Rank())
