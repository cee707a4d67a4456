"""Tests the compiling of kernels without a device."""

from pathlib import Path

import pytest
import triton
import triton.language as tl

from quire.ops.triton.arch import fitting_stages
from quire.ops.triton.binaries import Binary, code_of, code_path, find_in, pack
from quire.ops.triton.build import VariantError, build, build_fitting
from quire.ops.triton.jobs import Job, job_of
from quire.ops.triton.launch import Kernel
from quire.ops.triton.machine_code import inspect_code
from quire.ops.triton.variants import Variant
from tests.ops.triton import samples
from tests.ops.triton.compiled import PRODUCT, SAMPLES_FOLDER, SCALE, compiled_samples


@pytest.mark.timeout(300)
def test_kernels_are_compiled_for_a_card_that_is_not_here() -> None:
    scale, product = build([SCALE, PRODUCT], "sm_90", SAMPLES_FOLDER)
    assert isinstance(scale, Binary)
    assert isinstance(product, Binary)
    assert code_path(SAMPLES_FOLDER, scale).read_bytes()[:4] == b"\x7fELF"
    assert (scale.entry, scale.num_warps, scale.shared_bytes) == ("scale", 4, 0)
    assert product.shared_bytes == 4 * (64 + 16) * 128 * 2  # four stages of both blocks
    assert scale.num_hidden == 2


def test_what_is_compiled_is_found_again(tmp_path: Path) -> None:
    [binary] = build([SCALE], "sm_90", SAMPLES_FOLDER)
    assert isinstance(binary, Binary)
    written = code_path(SAMPLES_FOLDER, binary).stat().st_mtime_ns
    assert build([SCALE], "sm_90", SAMPLES_FOLDER) == [binary]
    assert code_path(SAMPLES_FOLDER, binary).stat().st_mtime_ns == written


@Kernel
def refused(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr, BLOCK, BLOCK, BLOCK))


@pytest.mark.timeout(300)
def test_a_kernel_that_the_compiler_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    [fault] = build([Variant(refused, {"x_ptr": "*bf16"}, {"BLOCK": 16}, 4, 1, "")], "sm_90", tmp_path, 1)
    assert isinstance(fault, VariantError)
    assert str(fault).startswith("refused: CompilationError: ")


def keys(*variants: Variant, arch: str = "sm_90") -> list[str]:
    return [job_of(each.kernel, each.specialization, arch).key for each in variants]


def test_a_key_differs_with_each_circumstance(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {**SCALE.constants, "BLOCK": 512}
    found = keys(SCALE, SCALE._replace(num_warps=8), SCALE._replace(num_stages=2), SCALE._replace(constants=constants))
    found += keys(SCALE._replace(signature={**SCALE.signature, "x_ptr": "*fp16"}))
    found += keys(SCALE, arch="sm_89")
    monkeypatch.setattr(triton, "__version__", "0")
    found += keys(SCALE)
    assert len(set(found)) == 7


def test_a_key_depends_on_helpers_and_on_values_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    [before] = keys(SCALE)
    with monkeypatch.context() as patch:
        patch.setattr(samples, "FACTOR", tl.constexpr(4))
        [with_other_value] = keys(SCALE)

    @triton.jit
    def helped(x):
        return x + 0

    monkeypatch.setattr(samples, "helped", helped)
    [with_other_helper] = keys(SCALE)
    assert len({before, with_other_value, with_other_helper}) == 3


def test_a_job_survives_its_line() -> None:
    spec = SCALE.specialization._replace(constants=(("A", None), ("B", tl.bfloat16), ("C", True), ("D", "silu")))
    job = job_of(SCALE.kernel, spec, "sm_90")
    assert Job.read(job.line()) == job


def test_a_variant_that_lacks_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale: neither typed nor given a value, or unknown: \['BLOCK'\]"):
        _ = SCALE._replace(constants={"bias_ptr": None}).specialization


@pytest.mark.timeout(300)
def test_instructions_are_counted() -> None:
    scale, product = (inspect_code(SAMPLES_FOLDER, each) for each in compiled_samples())
    assert scale.instructions["LDG.E.128"] == 1
    assert product.instructions["HGMMA"] == 8
    assert product.stack_bytes == 0


@pytest.mark.timeout(300)
def test_an_archive_is_read_as_its_folder_is(tmp_path: Path) -> None:
    binaries = compiled_samples()
    archive = tmp_path / "kernels.zip"
    pack(SAMPLES_FOLDER, binaries, archive)
    for binary in binaries:
        assert find_in([tmp_path, archive], binary.key) == binary
        assert code_of(archive, binary) == code_of(SAMPLES_FOLDER, binary)
    assert build([SCALE, PRODUCT], "sm_90", tmp_path / "new", known=[archive]) == list(binaries)
    assert not (tmp_path / "new").exists(), "nothing had to be compiled"
    assert find_in([archive], "0" * 32) is None
    assert find_in([tmp_path / "absent.zip"], binaries[0].key) is None
    (tmp_path / "broken.zip").write_bytes(b"PK")
    assert find_in([tmp_path / "broken.zip"], binaries[0].key) is None


@pytest.mark.timeout(300)
def test_a_pipeline_is_as_deep_as_the_card_has_memory() -> None:
    deep = PRODUCT._replace(num_stages=8)
    [binary], made = build_fitting([deep], "sm_89", SAMPLES_FOLDER)
    assert isinstance(binary, Binary)
    assert binary.shared_bytes == 4 * (64 + 16) * 128 * 2, "99 kB hold four stages"
    assert [each.shared_bytes > 101_376 for each in made] == [True, False]


def test_stages_that_fit() -> None:
    assert fitting_stages(4, 100, 100) == 4
    assert fitting_stages(4, 101, 100) == 3
    assert fitting_stages(8, 163_840, 101_376) == 4
    assert fitting_stages(2, 10_000, 100) == 1
    assert fitting_stages(1, 10_000, 100) == 1, "no fewer"
