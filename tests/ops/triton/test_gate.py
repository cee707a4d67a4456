"""Holds every kernel that a server may launch to what an H100 needs of it, by the machine code that is compiled for it.

Triton 3.6 and later compile without a device. What has been compiled before is read from the cache folder.

`QUIRE_TEST_ARCHES="sm_80 sm_89 sm_100 sm_120"` also holds one form of each kernel to the memory of these cards, and
`QUIRE_TEST_TRITON=FOLDER` everything here with the Triton in that folder (`pip install --target FOLDER triton==3.6.0`).
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import quire.ops.triton
from quire.ops.triton.arch import ARCHES
from quire.ops.triton.binaries import Binary
from quire.ops.triton.build import VariantError, build, build_fitting
from quire.ops.triton.machine_code import MachineCode, inspect_code
from quire.ops.triton.variants import Variant, all_variants, some_of_each
from tests.ops.triton.compiled import FOLDER, VARIANTS

SM_90 = ARCHES["sm_90"]
WIDE_LOADS = ("LDG.E.128", "LDGSTS.E.BYPASS.128", "UTMALDG")
MULTIPLIERS = ("HGMMA", "QGMMA", "IGMMA")

WARP_GROUP_PRODUCTS = {
    *("multiply_few", "multiply_many", "multiply_few_codes", "multiply_experts", "multiply_router"),
    *("prompt_attention", "pass_chunks", "pass_delta_chunks", "solve_chunks"),
}
"""Kernels whose products have 64 rows."""
WITHOUT_WIDE_LOADS = {
    "dequantize_codes",
    "sort_choices",
    "select_experts",
    "normalize_gated",
    "rotation_rows",
    "likeliest_of_rows",
    "clear_counts",
    "count_tokens",
    "write_tokens",
    "average_tokens",
    "gate_tokens",
    "weigh_tokens",
    "remember_tokens",
}
"""Kernels that read nothing, a number a thread, rows of odd lengths, ids or bytes here and there, or 4 bytes of codes
for 16 written.
"""
CHAINED = {
    *("multiply_few", "rms_norm_rows", "add_rms_norm_rows", "rotate_and_store_heads", "decode_attention"),
    "rotate_and_attend",
}
"""Kernels of a dense model's decode steps."""
MOST_STACK_BYTES = {"decode_attention": 8}
"""With Triton 3.9, and not with 3.6, one number of its form with sinks is stored and read once."""
WITHOUT_CONVERSIONS = {"multiply_few_codes", "dequantize_codes"}
"""Kernels that make numbers of codes by their bits."""
DIVISIONS = 4
"""Conversions of integers in the divisions of a few sizes and places."""


class Compiled(NamedTuple):
    """A variant, and what an H100 executes for it."""

    variant: Variant
    binary: Binary
    code: MachineCode


@pytest.fixture(scope="session")
def binaries(request: pytest.FixtureRequest) -> dict[int, Binary | VariantError]:
    """The variants of the session's tests by their numbers, compiled together: those of one turn take minutes less."""
    calls = [item.callspec.params for item in request.session.items if isinstance(item, pytest.Function)
             and item.path == Path(__file__) and hasattr(item, "callspec")]  # fmt: skip
    numbers = sorted({params["number"] for params in calls if "number" in params})
    return dict(zip(numbers, build([VARIANTS[each] for each in numbers], "sm_90", FOLDER), strict=True))


@pytest.fixture
def compiled(number: int, binaries: dict[int, Binary | VariantError]) -> Compiled:
    binary = binaries[number]
    if isinstance(binary, VariantError):
        raise binary
    return Compiled(VARIANTS[number], binary, inspect_code(FOLDER, binary))


@pytest.mark.parametrize(
    "names", [WARP_GROUP_PRODUCTS, WITHOUT_WIDE_LOADS, CHAINED, set(MOST_STACK_BYTES), WITHOUT_CONVERSIONS]
)
def test_names_are_those_of_kernels(names: set[str]) -> None:
    """No test is left without its kernel when one gets another name."""
    assert names - {each.kernel.name for each in VARIANTS} == set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [pytest.param(n, id=f"{each.kernel.name}-{n}") for n, each in enumerate(VARIANTS)])
def test_a_variant_is_what_the_card_needs(number: int, compiled: Compiled) -> None:
    """One test for all needs, so that a variant's have one turn."""
    name = compiled.variant.kernel.name
    check_fit(*compiled)
    if name not in WITHOUT_WIDE_LOADS:
        assert set(WIDE_LOADS) & set(compiled.code.instructions), "it reads 16 bytes at a time"
    if name in CHAINED:
        assert compiled.binary.waits, "it may start early, and waits before it reads"
        assert compiled.code.num_early_accesses == 0
    if name in WARP_GROUP_PRODUCTS:
        assert set(MULTIPLIERS) & set(compiled.code.instructions), "a product of 64 rows is a warp group's"
    if name in WITHOUT_CONVERSIONS:
        assert compiled.code.instructions.get("I2F", 0) <= DIVISIONS, "codes are not converted"


def check_fit(variant: Variant, _: Binary, code: MachineCode) -> None:
    """A variant fits the card without spills."""
    most_stack_bytes = MOST_STACK_BYTES.get(variant.kernel.name, 0)
    assert code.shared_bytes <= SM_90.max_shared_bytes
    assert code.stack_bytes <= most_stack_bytes
    assert max(code.instructions.get(name, 0) for name in ("STL", "LDL")) <= most_stack_bytes // 8
    assert code.num_registers * variant.num_warps * SM_90.warp_size <= SM_90.num_registers
    assert code.programs_per_processor >= 1


def test_a_reason_and_a_value_is_given_for_each_parameter() -> None:
    for variant in all_variants():
        assert variant.reason
        assert len(variant.specialization.types) == len(variant.kernel.parameters)


def ignored_statements(path: Path) -> Iterator[str]:
    """Calls of `tl.multiple_of` with a plain parameter: Triton loses what they say, and loads become narrow."""
    for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
        names = {each.arg for each in function.args.args}
        for node in ast.walk(function):
            match node:
                case ast.Call(ast.Attribute(attr="multiple_of"), [ast.Name(name), *_]) if name in names:
                    yield f"{path.name}:{node.lineno}: tl.multiple_of({name}, …)"


def test_no_kernel_says_of_a_plain_parameter_what_the_compiler_ignores() -> None:
    files = Path(quire.ops.triton.__file__).parent.glob("*.py")
    assert [each for path in files for each in ignored_statements(path)] == []


def test_variants_are_told_apart() -> None:
    names: dict[str, Variant] = {}
    for variant in all_variants():
        other = names.setdefault(f"{variant.kernel.name}{variant.specialization}", variant)
        assert other is variant


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", os.environ.get("QUIRE_TEST_ARCHES", "").split())
def test_kernels_fit_into_other_cards(arch: str) -> None:
    variants = some_of_each(all_variants(), 1)
    built, _ = build_fitting(variants, arch, FOLDER)
    for variant, binary in zip(variants, built, strict=True):
        assert isinstance(binary, Binary), binary
        code, card = inspect_code(FOLDER, binary), ARCHES[arch]
        assert code.shared_bytes <= card.max_shared_bytes, variant.kernel.name
        assert code.num_registers * variant.num_warps * card.warp_size <= card.num_registers, variant.kernel.name


OTHER_TRITON = os.environ.get("QUIRE_TEST_TRITON")


@pytest.mark.timeout(3600)
@pytest.mark.skipif(OTHER_TRITON is None, reason="QUIRE_TEST_TRITON names no folder with another Triton")
def test_another_triton_holds_all_of_this() -> None:
    paths = [str(OTHER_TRITON), *(each for each in sys.path if each)]
    environment = {name: value for name, value in os.environ.items() if name != "QUIRE_TEST_TRITON"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
