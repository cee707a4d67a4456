"""Tests the page of what is known of each kernel."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/gpu"))


def test_a_line_has_the_range_of_a_kernels_variants() -> None:
    import kernel_report as report

    row = report.Row("sum_chunks", "sampling", "(*bf16)", "", "sm_90", "3.6.0", 30, 0, 1024, 8, {"LDG.E.128": 2})
    wide = row._replace(registers=60, shared_bytes=70_000, programs=3, instructions={"HGMMA": 4})
    refused = row._replace(fault="sum_chunks: no")
    page = report.page_of([row, wide, refused], [])
    assert (
        "| `sum_chunks` | `tests/ops/triton/test_sampling.py` | 2 of 3 | 30–60 | 0 | 1–69 | 3–8 | "
        "HGMMA 0–4, LDG.E.128 0–2 |"
    ) in page
    assert "`sum_chunks` (*bf16): sum_chunks: no" in page
    assert "No figures yet." in page


def test_figures_have_their_card_and_their_share_of_the_floor(tmp_path: Path) -> None:
    import kernel_report as report

    lines = [
        {"ceilings": {"card": "H100"}, "commit": "abc"},
        {"kernel": "linear", "case": "8b.down of 1", "us": 50.0, "floor_us": 40.0, "commit": "abc"},
        {"failed": "linear", "case": "8b.down of 2", "commit": "abc"},
        {"part": "kernels", "outcome": "done"},
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    figures = report.figures_of(path)
    assert "| linear | 8b.down of 1 | H100 | abc | 50.0 | 80 % |" in report.page_of([], figures)
    assert len(figures) == 1


def test_what_no_run_replaces_stays(tmp_path: Path) -> None:
    import kernel_report as report

    old = report.Row("cap", "elementwise", "(*bf16)", "", "sm_90", commit="abc")
    other, new = old._replace(arch="sm_80"), old._replace(registers=9, commit="def")
    figure = {"card": "H100", "kernel": "cap", "case": "a", "us": 9.0, "floor_us": 3.0}
    known = report.Ledger([old, other], [figure, {**figure, "case": "b"}])
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"compiled": [row._asdict() for row in known.rows], "measured": known.figures}))
    assert report.Ledger.read(path) == known
    updated = known.updated(report.Ledger([new], [{**figure, "us": 6.0}]))
    assert updated.rows == [other, new]
    assert [(each["case"], each["us"]) for each in updated.figures] == [("b", 9.0), ("a", 6.0)]
    page = report.page_of(*updated)
    assert "## Compiled for sm_90, by Triton , at def" in page
    assert "| cap | a | H100 |  | 6.0 | 50 % |" in page
    assert report.Ledger.read(tmp_path / "none.json") == report.Ledger([], [])


def test_a_kernel_without_tests_of_its_file_is_proven_by_those_of_who_imports_it() -> None:
    import kernel_report as report

    assert [path.name for path in report.tests_of("norms")] == ["test_norms.py"]
    assert [path.name for path in report.tests_of("codes")] == ["test_quantized.py"]
    assert [path.name for path in report.tests_of("delta_chunks")] == ["test_recurrent.py"]
