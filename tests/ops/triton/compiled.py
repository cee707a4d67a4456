"""Kernels as the tests compile them: in a folder that lasts, whose keys are hashes of the sources."""

from functools import cache

from quire.ops.triton.binaries import Binary
from quire.ops.triton.build import VariantError, build
from quire.ops.triton.jobs import cache_folder
from quire.ops.triton.machine_code import MachineCode, inspect_code
from quire.ops.triton.variants import Variant, all_variants
from tests.ops.triton.samples import product, scale

FOLDER = cache_folder() / "tests"
SCALE = Variant(
    scale,
    {"out_ptr": "*bf16", "x_ptr": "*bf16", "row_stride": "i64", "num_columns": "i32", "factor": "fp32"},
    {"bias_ptr": None, "BLOCK": 1024},
    num_warps=4,
    num_stages=1,
    reason="a vector a thread",
)
PRODUCT = Variant(
    product,
    {"out_ptr": "*fp32", "x_ptr": "*bf16", "weight_ptr": "*bf16", "num_columns": "i32"},
    {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128},
    num_warps=4,
    num_stages=4,
    reason="64 rows for wgmma",
)
HELD = [each for each in all_variants() if "*fp16" not in each.signature.values()]
"""The variants that the gate holds; those of float16 are the same code with another type."""
VARIANTS = [*HELD, SCALE, PRODUCT]


@cache
def compiled(arch: str = "sm_90") -> dict[int, Binary | VariantError]:
    """The variants, compiled for a card."""
    return dict(enumerate(build(VARIANTS, arch, FOLDER)))


def machine_code(number: int) -> MachineCode:
    """What sm_90 executes for a variant of that number."""
    binary = compiled()[number]
    if isinstance(binary, VariantError):
        raise binary
    return inspect_code(FOLDER, binary)
