"""Tests that kernels which are wrong, raise, hang or end their process are found, and left to plain torch."""

import json
import logging
from pathlib import Path

import pytest
import torch

from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.canary import Canary
from quire.ops.triton.canary_cases import CASES, backends
from quire.ops.triton.canary_inputs import Case
from quire.ops.triton.canary_process import difference, fault_of
from tests.ops.triton.conftest import DEVICE

SUITE = "tests.ops.triton.canaries"


def canary(folder: Path, *circumstances: str) -> Canary:
    return Canary(folder, circumstances or ("a card",), suite=SUITE, max_case_seconds=5.0)


@pytest.mark.timeout(300)
def test_what_does_not_work_is_found_once_and_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, prepared = canary(tmp_path), []
    assert not first.is_decided
    first.start(lambda: prepared.append(True))
    broken = {"rms_norm", "layer_norm", "add", "scale", "activate_and_mul"}
    assert first.broken_operations() == broken
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "plain torch serves activate_and_mul, add, layer_norm, rms_norm, scale" in record.getMessage()
    [path] = tmp_path.glob("canary-*.json")
    faults = json.loads(path.read_text())
    assert faults["right"] == ""
    assert faults["rms_norm"].startswith("result 0: 1 of 5120 values are wrong; first ")
    assert faults["layer_norm"] == "RuntimeError: an illegal memory access was encountered"
    assert faults["hangs"] == "no result after 5 s"
    assert faults["ends"] == "the process ended with status 7"

    again = canary(tmp_path)
    assert again.is_decided
    again.start(lambda: prepared.append(True))
    assert prepared == [True]
    assert again.broken_operations() == broken
    assert not canary(tmp_path, "another card").is_decided


def test_a_folder_that_cannot_be_written_costs_the_memory_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lone = Canary(tmp_path / "file", ["a card"], suite="tests.ops.triton.lone_canary")
    lone.start()
    assert lone.broken_operations() == {"rms_norm"}


def test_a_card_without_room_is_tested_again_at_the_next_start(tmp_path: Path) -> None:
    crowded = Canary(tmp_path, ["a card"], suite="tests.ops.triton.occupied_canary")
    crowded.start()
    assert crowded.broken_operations() == {"add"}
    assert not Canary(tmp_path, ["a card"], suite="tests.ops.triton.occupied_canary").is_decided


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_kernels_of_this_tree_pass(case: Case) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    assert fault_of(case, *backends(), torch.device(DEVICE), dtype) == ""


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        ([1.0, 2.0], [1.0, 2.001], ""),
        ([1.0, float("nan")], [1.0, 2.0], "1 of 2 values are wrong; first nan instead of 2"),
        ([1.0, float("inf")], [1.0, float("inf")], ""),
        ([3, 4], [3, 5], "1 of 2 values are wrong; first 4 instead of 5"),
        ([3, 4], [3], "result 0 is torch.int64 [2], not torch.int64 [1]"),
    ],
)
def test_differences(got: list[float], expected: list[float], message: str) -> None:
    assert difference([torch.tensor(got)], [torch.tensor(expected)], 1e-2).endswith(message)
    assert bool(message) == bool(difference([torch.tensor(got)], [torch.tensor(expected)], 1e-2))


def test_operations_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a kernel that does not work was launched")

    names = {each for case in CASES for each in case.operations}
    monkeypatch.setattr("quire.ops.triton.launch.Kernel.__call__", fail)
    _, eager = backends()
    for backend in (TritonBackend(names), TritonBackend()):
        backend.leave_to_torch(names)
        for case in CASES:
            assert fault_of(case, backend, eager, torch.device(DEVICE), torch.float16) == ""
