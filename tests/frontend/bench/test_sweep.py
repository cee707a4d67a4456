"""Sweeps: grids, command lines, real runs, resumption, and plots."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.bench.sweep import plots, serve
from quire.frontend.bench.sweep.children import base_url
from quire.frontend.bench.sweep.grid import Setting, read_settings
from quire.frontend.bench.sweep.report import table_of
from tests.servers import free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

QUIRE = [sys.executable, "-m", "quire"]


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*QUIRE, *arguments], capture_output=True, text=True, timeout=120)


def test_settings_come_as_lists_names_or_combinations(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text('[{"max_num_seqs": 8}, {"max_num_seqs": 16, "_benchmark_name": "wide"}]')
    assert read_settings("--serve-params", str(path)) == [
        Setting("max_num_seqs=8", {"max_num_seqs": 8}),
        Setting("wide", {"max_num_seqs": 16}),
    ]
    assert [each.name for each in read_settings("--p", '{"small": {"n": 1}, "large": {"n": 2}}')] == ["small", "large"]
    combined = read_settings("--p", '{"a": [1, 2], "b": [3, 4]}')
    assert [each.flags for each in combined] == [{"a": a, "b": b} for a in (1, 2) for b in (3, 4)]
    assert read_settings("--p", None) == [Setting("")]


@pytest.mark.parametrize("text", ["[]", "[1]", "{", "/nowhere.json", '{"a": 1}', '[{"a": 1}, {"a": 1}]'])
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--serve-params"):
        read_settings("--serve-params", text)


def test_a_setting_replaces_the_flags_of_the_command() -> None:
    command = shlex.split("quire serve --max_num_seqs 4 --no-enable-prefix-caching MODEL --port=8000")
    setting = Setting(
        "", {"max_num_seqs": 8, "enable_prefix_caching": True, "port": 8001, "seed": None, "x.y": {"a": 1}}
    )
    assert shlex.join(setting.apply(command)) == (
        "quire serve MODEL --max-num-seqs 8 --enable-prefix-caching --port 8001 --x.y '{\"a\":1}'"
    )


def test_the_server_is_found_where_its_command_puts_it() -> None:
    assert base_url(["quire", "serve"]) == "http://127.0.0.1:8000"
    assert base_url(shlex.split("quire serve --host 0.0.0.0 --port=81")) == "http://127.0.0.1:81"


def test_servers_and_loads_are_combined_and_resumed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    start = [*QUIRE, "serve", str(checkpoint("llama")), "--port", str(free_port()), "--num-gpu-blocks-override", "256"]
    load = [*QUIRE, "bench", "serve", "--num-prompts", "4", "--input-len", "5", "--output-len", "3", "--ignore-eos"]
    sweep = [
        "bench", "sweep", "serve", "--serve-cmd", shlex.join(start), "--bench-cmd", shlex.join(load), "--bench-params",
        '{"max_concurrency": [1, 2]}', "--num-runs", "1", "-o", str(tmp_path), "-e", "one", "--no-plots",
    ]  # fmt: skip
    done = quire(*sweep)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "one" / "summary.json").read_text())["results"]
    assert [(row["bench"], row["completed"]) for row in rows] == [("max_concurrency=1", 4), ("max_concurrency=2", 4)]
    assert "Sweep one" in done.stdout

    assert "--resume" in quire(*sweep).stderr
    (tmp_path / "one" / "max_concurrency=1" / "run=0.json").write_text(json.dumps(rows[0] | {"completed": 99}))
    done = quire(*sweep, "--resume")
    assert done.returncode == 0, done.stderr
    assert "--max-concurrency" not in done.stdout
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["results"][0]["completed"] == 99


def test_a_throughput_sweep_goes_on_after_an_error(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    command = [*QUIRE, "bench", "throughput", "--model", str(checkpoint("llama")), "--num-prompts", "2"]
    sweep = [
        "bench", "sweep", "throughput", "--bench-cmd", shlex.join([*command, "--input-len", "4"]), "--num-runs", "1",
        "--bench-params", '[{"output_len": -1}, {"output_len": 3}]', "-o", str(tmp_path), "-e", "two", "--no-plots",
    ]  # fmt: skip
    assert len(quire(*sweep, "--dry-run").stdout.splitlines()) == 2
    assert not (tmp_path / "two").exists()
    done = quire(*sweep, "--continue-on-error")
    assert done.returncode == 1
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert [row["total_output_tokens"] for row in summary["results"]] == [6]
    assert "output length must be at least 1" in summary["errors"][0]


def results() -> list[dict]:
    return [
        {"serve": server, "bench": f"c={c}", "output_throughput": c * 10.0 + run, "median_tpot_ms": float(c)}
        | {"median_ttft_ms": c * 2.0, "median_e2el_ms": c * 3.0}
        for server in ("<plain>", "wide")
        for c in (1, 8)
        for run in range(3)
    ]


def test_points_are_medians_over_runs() -> None:
    assert table_of(results(), [serve.OUTPUT])[1] == ["<plain>", "c=1", "3", "11.00"]


def test_plots_are_drawn_and_the_page_holds_everything(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.draw(tmp_path, "Sweep", results(), serve.PLOTS, table_of(results(), [serve.OUTPUT]))
    for plot in serve.PLOTS:
        assert (tmp_path / f"{plot.name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == len(serve.PLOTS)
    assert "&lt;plain&gt;" in page
    assert "<td>11.00</td>" in page


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path) -> None:
    hidden = (
        "import sys; sys.modules['matplotlib'] = None; from quire.frontend.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "bench", "sweep", "throughput", "-o", str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "quire[bench]" in done.stderr
