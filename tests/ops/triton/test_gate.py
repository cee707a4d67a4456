"""Holds every kernel that a server may launch to what an H100 needs of it, by the machine code that is compiled for it.

Triton 3.6 and later compile without a device. What has been compiled before is read from the cache folder.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire.ops.triton
from quire.ops.triton.arch import ARCHES
from quire.ops.triton.binaries import Binary
from quire.ops.triton.variants import Variant, all_variants
from tests.ops.triton.compiled import VARIANTS, compiled, machine_code

SM_90 = ARCHES["sm_90"]
WIDE_LOADS = ("LDG.E.128", "LDGSTS.E.BYPASS.128", "UTMALDG")
MULTIPLIERS = ("HGMMA", "QGMMA", "IGMMA")

WARP_GROUP_PRODUCTS = {
    *("multiply_few", "multiply_many", "multiply_few_codes", "multiply_experts", "multiply_router"),
    "prompt_attention",
}
"""Kernels whose products have 64 rows."""
WITHOUT_WIDE_LOADS = {
    "dequantize_codes",
    "sort_choices",
    "select_experts",
    "normalize_gated",
    "rotation_rows",
    "likeliest_of_rows",
}
"""Kernels that read single numbers, lists of ids or bytes here and there, or 4 bytes of codes for 16 written."""
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


def numbered(names: set[str] | None = None) -> list[object]:
    return [
        pytest.param(number, id=f"{each.kernel.name}-{number}")
        for number, each in enumerate(VARIANTS)
        if names is None or each.kernel.name in names
    ]


@pytest.mark.parametrize(
    "names", [WARP_GROUP_PRODUCTS, WITHOUT_WIDE_LOADS, CHAINED, set(MOST_STACK_BYTES), WITHOUT_CONVERSIONS]
)
def test_names_are_those_of_kernels(names: set[str]) -> None:
    """No test is left without its kernel when one gets another name."""
    assert names - {each.kernel.name for each in VARIANTS} == set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", numbered())
def test_a_variant_fits_the_card_without_spills(number: int) -> None:
    variant, code = VARIANTS[number], machine_code(number)
    most_stack_bytes = MOST_STACK_BYTES.get(variant.kernel.name, 0)
    assert code.shared_bytes <= SM_90.max_shared_bytes
    assert code.stack_bytes <= most_stack_bytes
    assert max(code.instructions.get(name, 0) for name in ("STL", "LDL")) <= most_stack_bytes // 8
    assert code.num_registers * variant.num_warps * SM_90.warp_size <= SM_90.num_registers
    assert code.programs_per_processor >= 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", numbered({each.kernel.name for each in VARIANTS} - WITHOUT_WIDE_LOADS))
def test_a_variant_reads_16_bytes_at_a_time(number: int) -> None:
    assert set(WIDE_LOADS) & set(machine_code(number).instructions)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", numbered(CHAINED))
def test_a_kernel_that_may_start_early_waits_before_it_reads(number: int) -> None:
    binary = compiled()[number]
    assert isinstance(binary, Binary)
    assert binary.waits
    assert machine_code(number).num_early_accesses == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", numbered(WARP_GROUP_PRODUCTS))
def test_a_product_of_64_rows_is_a_warp_groups(number: int) -> None:
    assert set(MULTIPLIERS) & set(machine_code(number).instructions)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", numbered(WITHOUT_CONVERSIONS))
def test_codes_are_not_converted(number: int) -> None:
    assert machine_code(number).instructions.get("I2F", 0) <= DIVISIONS


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
