"""`quire bench ops`: the kernels' times against their floors, as a table and as JSON."""

import json

import pytest

from quire.core.wire.inspection import OpTiming
from quire.frontend.bench.ops import ratio
from tests.commands import quire

SMALL = [
    *("--hidden-size", "64", "--intermediate-size", "64", "--num-heads", "2", "--num-kv-heads", "1"),
    *("--head-dim", "16", "--context", "16", "--seconds", "0"),
]


def test_a_ratio_is_to_the_longer_floor() -> None:
    timing = OpTiming("linear", "bf16", 8, 100, 200, best_s=6.0, read_s=2.0, multiply_s=3.0)
    assert ratio(timing) == 2
    timing.read_s = 4.0
    assert ratio(timing) == 1.5


def test_the_grid_is_a_table_or_json() -> None:
    done = quire("bench", "ops", *SMALL, "--ops", "linear,attention", "--dtypes", "fp32,int8", "--rows", "1,5")
    if "no CPU kernels" in done.stderr:
        pytest.skip("there are no kernels")
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert lines[0] == ["operation", "dtype", "1 row", "5 rows"]
    operations = [("linear", "fp32"), ("linear", "int8"), ("attention", "fp32"), ("attention", "int8")]
    assert [tuple(line[:2]) for line in lines[2:]] == operations

    done = quire(
        "bench", "ops", *SMALL, "--ops", "linear", "--dtypes", "fp32", "--rows", "1", "--threads", "1", "--json"
    )
    (level,) = json.loads(done.stdout)["levels"]
    assert level["num_threads"] == 1
    assert level["timings"][0]["ratio"] == pytest.approx(
        level["timings"][0]["best_s"] / max(level["timings"][0]["read_s"], level["timings"][0]["multiply_s"])
    )


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--isa", "mmx"], "--isa mmx: QUIRE_CPU_ISA must be one of", 1),
        (["--dtypes", "fp5"], "--dtypes must be some of", 1),
        (["--top-k", "99"], "--top-k at most --num-experts", 1),
        (["--context", "0"], "--context: must be at least 1 (got '0')", 2),
        (["--rows", "8,x"], "--rows: needs a whole number (got 'x')", 2),
        (["--seconds", "-1"], "--seconds: must be at least 0 (got '-1')", 2),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments: list[str], says: str, code: int) -> None:
    done = quire("bench", "ops", *SMALL, *arguments)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
