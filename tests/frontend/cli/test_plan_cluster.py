"""`quire plan --nodes`: from a checkpoint's configuration to layouts and reasons."""

import json
from pathlib import Path

import pytest

from quire.frontend.cli.main import QUIRE
from tests.executor.paged_driver import Checkpoints

LOAD = ["--input-len", "100", "--output-len", "50", "--concurrency", "32"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = QUIRE.run("quire", ["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out if code == 0 else printed.err


def test_all_layouts_as_json(checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(checkpoint("qwen3_moe", num_hidden_layers=4))
    code, out = run(
        capsys, folder, "--nodes", "3", "--gpus", "1", "--device", "h200", *LOAD, "--experts-over-engines", "--json"
    )
    found = json.loads(out)
    assert code == 0
    layouts = {(each["tensor"], each["pipeline"], each["data"], each["expert"]) for each in found["layouts"]}
    assert layouts == {(1, 1, 3, 1), (1, 1, 3, 3), (1, 3, 1, 1)}
    assert [each["tensor"] for each in found["refused"]] == [3]
    best, *others = found["layouts"]
    assert best["reason"] == ""
    assert all(each["reason"] for each in others)
    assert all(
        each["output_tokens_per_second"] <= best["output_tokens_per_second"] and each["fits"]
        for each in found["layouts"]
    )
    assert sum(best["step_seconds"].values()) == pytest.approx(best["tpot_seconds"])


def test_the_table_and_a_device_of_ones_own(
    checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    device = tmp_path / "small.json"
    figures = {"memory_bytes": 2 * 10**9, "bytes_per_second": 1e9, "operations_per_second": 1e9}
    device.write_text(json.dumps({**figures, "link_bytes_per_second": 1e9}))
    flags = [
        "--nodes",
        "2",
        "--gpus",
        "2",
        "--device",
        str(device),
        "--network",
        "eth-10",
        "--memory-efficiency",
        "0.5",
    ]
    code, out = run(capsys, str(checkpoint("llama")), *flags, *LOAD, "--rate", "0.001", "--top", "2")
    assert code == 0, out
    lines = out.splitlines()
    assert lines[1].endswith("2 nodes of 2 × " + str(device))
    assert "0.001 requests a second" in lines[2]
    assert lines[4].startswith("layout ")
    assert "--top " in lines[7]
    assert any(line.startswith("Best: ") for line in lines)
    device.write_text(json.dumps(figures))
    code, err = run(capsys, str(checkpoint("llama")), *flags)
    assert code == 1
    assert "link_bytes_per_second" in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--nodes", "2"], "--nodes needs --device: one of "),
        (["--device", "h200"], "--device h200 is for a plan with --nodes"),
        (["--nodes", "2", "--device", "h200", "--network", "string"], "--network string: choose from ib-ndr"),
        (["--nodes", "2", "--device", "none.json"], "--device none.json: choose from a100"),
        (["--nodes", "2", "--device", "h200", "--rate", "0"], "--rate must be above 0"),
        (["--nodes", "2", "--device", "h200", "--input-len", "9999"], "--input-len 9999 and --output-len 256"),
    ],
)
def test_wrong_flags(
    checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    code, err = run(capsys, str(checkpoint("llama")), *flags)
    assert code == 1
    assert expected in err


def test_a_word_that_is_no_device_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "model", "--device", "h2000")
    assert "--device: choose from auto, cpu, cuda" in capsys.readouterr().err
