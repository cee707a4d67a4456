"""`quire bench fleet` on few engines: what the router gains, and that no request is lost when engines die."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.frontend.cli.main import QUIRE
from quire.frontend.labs.fleet.command import measure
from quire.frontend.labs.fleet.engine import EngineShape
from quire.frontend.labs.fleet.simulation import Deaths
from quire.frontend.labs.fleet.workload import FleetLoad, arrivals

LOAD = FleetLoad(seconds=10.0, rate=2.0, shared_len=500, suffix_len=100, output_len=40, families=1)
CALM = Deaths(dying=0.0)


def run(rules: str, *, load: FleetLoad = LOAD, deaths: Deaths = CALM, **shape: Any) -> dict[str, Any]:
    return measure(20, 4096, rules, load, EngineShape(**shape), deaths)


def test_the_router_finds_most_of_what_one_endless_cache_would_have() -> None:
    routed, by_load = run("prefixes"), run("load")
    assert routed["lost"] == by_load["lost"] == 0
    assert routed["hit_rate"] > 0.85 * routed["possible_hit_rate"]
    assert routed["hit_rate"] > 1.3 * by_load["hit_rate"]
    assert routed["ttft_mean"] < by_load["ttft_mean"]


def test_busy_engines_are_kept_alike() -> None:
    """All requests have one prefix, and no engine may be drowned in them for that."""
    load = FleetLoad(seconds=6.0, rate=6.0, shared_len=500, suffix_len=100, output_len=40, families=1, zipf=8.0)
    routed = run("prefixes", load=load, slots=16)
    assert routed["hit_rate"] > 0.8 * routed["possible_hit_rate"]
    assert routed["imbalance"] < 2.5
    assert routed["ttft_p99"] < 2.0


def test_requests_of_dead_engines_are_finished_by_others() -> None:
    died = run("prefixes", deaths=Deaths(dying=0.2, notice_seconds=1.0, restart_seconds=2.0))
    assert died["moved"] > 0
    assert died["lost"] == 0
    assert died["moved_seconds_mean"] > 1.0


def test_when_all_but_one_die_their_requests_wait_for_it() -> None:
    died = run("prefixes", deaths=Deaths(dying=0.95, notice_seconds=0.5, restart_seconds=3.0))
    assert died["lost"] == 0


def test_a_run_can_be_repeated() -> None:
    one, other = (run("prefixes", deaths=Deaths()) for _ in range(2))
    assert {key: value for key, value in one.items() if "router" not in key} == {
        key: value for key, value in other.items() if "router" not in key
    }


def test_arrivals_are_what_was_asked() -> None:
    found = list(arrivals(FleetLoad(seconds=20.0, rate=5.0, families=5, zipf=1.0), 20, 4096))
    assert len(found) == pytest.approx(20 * 5 * 20, rel=0.15)
    assert all(len(each.prompt) + each.output_len <= 4096 for each in found)
    pauses = np.diff([each.at for each in found])
    assert np.std(pauses) / np.mean(pauses) == pytest.approx(0.5**-0.5, rel=0.15)
    counts = np.sort(np.unique([tuple(each.prompt[:1]) for each in found], return_counts=True)[1])[::-1]
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[3]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    flags = ["--engines", "4", "--seconds", "2", "--shared-len", "100", "--output-json", str(path)]
    assert QUIRE.run("quire", ["bench", "fleet", *flags]) == 0
    assert "4 engines, routed by" in capsys.readouterr().out
    assert set(json.loads(path.read_text())["runs"]) == {"prefixes", "load"}
