"""Tests the launcher of compiled kernels against a library that has the driver's calls."""

import errno
import logging
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.ops.triton.binaries import Binary, store
from quire.ops.triton.driver import Driver, DriverError
from quire.ops.triton.jobs import Job
from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.launcher import Launcher
from tests.ops.triton.compiled import PRODUCT, SAMPLES_FOLDER, SCALE, compiled_samples
from tests.ops.triton.fake_driver import INVALID_CONTEXT, FakeLibrary
from tests.ops.triton.samples import product, scale

DEVICE, STREAM = 1, 0x5EED
HIDDEN = 2  # pointers to scratch memory, with every version of Triton from 3.6 to 3.9


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary({"scale": 5 + HIDDEN, "product": 4 + HIDDEN})


def place() -> tuple[int, int]:
    return DEVICE, STREAM


@pytest.fixture
def launcher(library: FakeLibrary) -> Launcher:
    """Has the kernels of `compiled_samples`, and compiles nothing."""
    compiled_samples()

    def refuse(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        raise AssertionError(f"{kernel.name}{job.specialization} is not compiled ahead")

    return Launcher(Driver(library), "sm_90", [Path("/no/such/folder"), SAMPLES_FOLDER], place, refuse)


def of(*values: tuple[str, Any]) -> list[bytes]:
    """The bytes of arguments, each in the type's own size, as a little-endian machine has them."""
    return [struct.pack(f"<{letter}", value) for letter, value in values]


@pytest.mark.timeout(300)
def test_arguments_have_the_types_of_the_signature(launcher: Launcher, library: FakeLibrary) -> None:
    x, out = torch.zeros(2, 1024, dtype=torch.bfloat16), torch.zeros(2, 1024, dtype=torch.bfloat16)
    launcher.launch(scale, (2,), (out, x, None, 2**33, 24, 0.5), 4, 1, {"BLOCK": 1024})
    [launch] = library.launches
    expected = of(("Q", out.data_ptr()), ("Q", x.data_ptr()), ("q", 2**33), ("i", 24), ("f", 0.5), ("Q", 0), ("Q", 0))
    assert [slot[: len(value)] for slot, value in zip(launch.slots, expected, strict=True)] == expected
    assert (launch.entry, launch.grid, launch.block) == ("scale", (2, 1, 1), (128, 1, 1))
    assert (launch.shared_bytes, launch.stream) == (0, STREAM)
    assert library.loaded == [b"\x7fELF"]
    assert library.attributes == []
    assert library.contexts == [DEVICE]


def test_a_second_launch_loads_nothing_and_passes_its_own_values(launcher: Launcher, library: FakeLibrary) -> None:
    rows = torch.zeros(3, 1024, dtype=torch.bfloat16)
    for row_stride, num_columns in ((1, 1), (16, 1016), (-5, 2**31 - 1)):
        launcher.launch(scale, (1, 2, 3), (rows, rows, None, row_stride, num_columns, 1.0), 4, 1, {"BLOCK": 1024})
    assert len(library.loaded) == 1
    values = [struct.unpack("<q", each.slots[2]) + struct.unpack("<i", each.slots[3][:4]) for each in library.launches]
    assert values == [(1, 1), (16, 1016), (-5, 2**31 - 1)]
    assert library.launches[-1].grid == (1, 2, 3)


def test_large_shared_memory_is_asked_for(launcher: Launcher, library: FakeLibrary) -> None:
    out = torch.zeros(64, 16)
    x, weight = torch.zeros(16, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    launcher.launch(product, (1,), (out, x, weight, 256), 4, 4, dict(PRODUCT.constants))
    [launch] = library.launches
    assert launch.shared_bytes == 81_920
    assert ("product", 8, 81_920) in library.attributes  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def test_a_kernel_that_waits_may_start_early(library: FakeLibrary, tmp_path: Path) -> None:
    def compile_one(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        waits = kernel is product
        binary = Binary(job.key, kernel.name, "", job.arch, "3", kernel.name, 0, 4, HIDDEN, 0, 1, 0, waits)
        store(folder, binary, b"\x7fELF")
        return binary

    launcher = Launcher(Driver(library), "sm_90", [tmp_path], place, compile_one)
    rows = torch.zeros(64, 1024, dtype=torch.bfloat16)
    launcher.launch(scale, (1,), (rows, rows, None, 8, 8, 1.0), 4, 1, {"BLOCK": 1024})
    launcher.launch(product, (1,), (torch.zeros(64, 16), rows, rows, 256), 4, 4, dict(PRODUCT.constants))
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert [launch.attributes for launch in library.launches] == [[], [(6, 1)]]


def test_arguments_may_be_named_and_constants_not(launcher: Launcher, library: FakeLibrary) -> None:
    rows = torch.zeros(3, 1024, dtype=torch.bfloat16)
    launcher.launch(scale, (3,), (rows, rows, None, 8), 4, 1, {"factor": 2.0, "num_columns": 8, "BLOCK": 1024})
    launcher.launch(scale, (3,), (rows, rows, None, 8, 8, 2.0, 1024), 4, 1, {})
    assert library.launches[0] == library.launches[1]


def test_an_empty_grid_is_not_launched(launcher: Launcher, library: FakeLibrary) -> None:
    rows = torch.zeros(0, 1024, dtype=torch.bfloat16)
    launcher.launch(scale, (0,), (rows, rows, None, 8, 8, 1.0), 4, 1, {"BLOCK": 1024})
    assert library.launches == []


def test_a_thread_that_has_not_used_the_device_enters_its_context(launcher: Launcher, library: FakeLibrary) -> None:
    rows = torch.zeros(1, 1024, dtype=torch.bfloat16)
    library.results = [INVALID_CONTEXT]
    launcher.launch(scale, (1,), (rows, rows, None, 8, 8, 1.0), 4, 1, {"BLOCK": 1024})
    assert len(library.launches) == 1
    assert library.contexts == [DEVICE, DEVICE]


def test_what_the_driver_refuses_is_an_error_that_names_the_kernel(launcher: Launcher, library: FakeLibrary) -> None:
    rows = torch.zeros(1, 1024, dtype=torch.bfloat16)
    library.results = [1]
    with pytest.raises(DriverError, match=r"the launch of scale\(.*grid of \(1, 1, 1\): out of patience \(1\)"):
        launcher.launch(scale, (1,), (rows, rows, None, 8, 8, 1.0), 4, 1, {"BLOCK": 1024})


@pytest.mark.parametrize(
    ("arguments", "constants", "message"),
    [
        ((None, None, None, 8, 8, 1.0), {}, "lacks its constants BLOCK"),
        ((None, None, None, 8, 8, 1.0), {"BLOCK": 16, "BLOK": 1}, "has no constants BLOK"),
        ((None, None, 8, 8, 1.0), {"BLOCK": 16}, "lacks its arguments factor"),
        ((None, None, 1, 8, 8, 1.0), {"BLOCK": 16}, "bias_ptr must be a tensor"),
        ((None, None, None, torch.zeros(1), 8, 1.0), {"BLOCK": 16}, "row_stride must be no tensor"),
        ((None, None, None, "8", 8, 1.0), {"BLOCK": 16}, "must be a tensor, a number or None; got '8'"),
        ((None, None, None, True, 8, 1.0), {"BLOCK": 16}, "must be a tensor, a number or None; got True"),
    ],
)
def test_wrong_arguments_are_named(
    launcher: Launcher, arguments: tuple[Any, ...], constants: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        launcher.launch(scale, (1,), arguments, 4, 1, constants)


def test_a_variant_that_no_list_has_is_compiled_once_with_a_warning(
    library: FakeLibrary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs: list[Job] = []

    def compile_one(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        jobs.append(job)
        binary = Binary(
            job.key, kernel.name, str(job.specialization), job.arch, "3", kernel.name, 0, 4, HIDDEN, 0, 1, 0, False
        )
        store(folder, binary, b"\x7fELF")
        return binary

    launcher = Launcher(Driver(library), "sm_90", [tmp_path], place, compile_one)
    rows = torch.zeros(4, 1024, dtype=torch.bfloat16)
    column = rows[:, 1:]
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            launcher.launch(scale, (4,), (rows, rows, None, 1024, 8, 1.0), 4, 1, {"BLOCK": 1024})
        assert launcher.num_compiled == 1
        for x in (column, rows.half(), rows):
            launcher.launch(scale, (4,), (rows, x, None, 1024, 8, 1.0), 4, 1, {"BLOCK": 1024})
    assert launcher.num_compiled == 3
    assert jobs[0].specialization == SCALE.specialization
    assert [job.specialization.unaligned for job in jobs] == [(), ("x_ptr",), ()]
    assert [job.specialization.types[1] for job in jobs] == ["*bf16", "*bf16", "*fp16"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert warnings[0].startswith("compiled the kernel scale(*bf16, *bf16, i64, i32, fp32, bias_ptr=None, BLOCK=1024")
    again = Launcher(Driver(library), "sm_90", [tmp_path], place, compile_one)
    again.launch(scale, (4,), (rows, rows, None, 1024, 8, 1.0), 4, 1, {"BLOCK": 1024})
    assert again.num_compiled == 0


def test_a_kernel_gets_the_scratch_memory_that_it_asks_for(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def empty(size: int, **_: Any) -> torch.Tensor:
        asked.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr("quire.ops.triton.launcher.torch.empty", empty)

    def compile_one(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        binary = Binary(job.key, kernel.name, "", job.arch, "3", kernel.name, 0, 4, HIDDEN, 256, 128, 0, False)
        store(folder, binary, b"\x7fELF")
        return binary

    launcher = Launcher(Driver(library), "sm_90", [tmp_path], place, compile_one)
    rows = torch.zeros(4, 1024, dtype=torch.bfloat16)
    launcher.launch(scale, (4, 2), (rows, rows, None, 1024, 8, 1.0), 4, 1, {"BLOCK": 1024})
    assert asked == [4 * 2 * 256, 0]
    [launch] = library.launches
    assert launch.slots[5] != bytes(8)
    assert launch.slots[6] == bytes(8)


@pytest.mark.parametrize(("arch", "stages"), [("sm_90", [5]), ("sm_80", [5, 4]), ("sm_89", [5, 2]), ("sm_120", [5, 2])])
def test_a_card_with_less_shared_memory_gets_fewer_stages(
    library: FakeLibrary, tmp_path: Path, arch: str, stages: list[int]
) -> None:
    """A stage takes 36 kB, and 8 kB are none of the pipeline's."""
    compiled: list[int] = []

    def compile_one(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        depth = job.specialization.num_stages
        compiled.append(depth)
        shared = 36_000 * depth + 8_000
        binary = Binary(job.key, kernel.name, "", arch, "3", kernel.name, shared, 4, HIDDEN, 0, 1, 0, False)
        store(folder, binary, b"\x7fELF")
        return binary

    rows = torch.zeros(1, 1024, dtype=torch.bfloat16)
    for _ in range(2):  # the second launcher finds what the first has compiled
        launcher = Launcher(Driver(library), arch, [tmp_path], place, compile_one)
        launcher.launch(scale, (1,), (rows, rows, None, 1, 8, 1.0), 4, 5, {"BLOCK": 1024})
    assert compiled == stages
    assert {launch.shared_bytes for launch in library.launches} == {36_000 * stages[-1] + 8_000}


def test_a_full_disk_costs_a_warning_and_kernels_are_compiled_into_memory(
    library: FakeLibrary, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    sample, folders = next(each for each in compiled_samples() if each.kernel == "scale"), list[Path]()

    def compile_one(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        folders.append(folder)
        if folder == tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        binary = sample._replace(key=job.key)
        store(folder, binary, b"\x7fELF")
        return binary

    launcher = Launcher(Driver(library), "sm_90", [tmp_path], place, compile_one)
    x = torch.zeros(2, 1024, dtype=torch.bfloat16)
    for warps in (4, 8, 4):
        launcher.launch(scale, (2,), (x, x, None, 2**33, 24, 0.5), warps, 1, {"BLOCK": 1024})
    assert len(library.launches) == 3
    assert folders[0] == tmp_path
    assert set(folders[1:]) == {Path(os.environ["TRITON_CACHE_DIR"]).parent}
    assert len(folders) == 3, "the disk is not tried again"
    [warning] = [record.message for record in caplog.records if "cannot be kept" in record.message]
    assert f"No space left on device: '{tmp_path}'. Free space, or set QUIRE_CACHE_ROOT" in warning
    shutil.rmtree(folders[-1])
