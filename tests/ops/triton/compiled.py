"""Kernels as the tests compile them: in a folder that lasts, whose keys are hashes of the sources."""

from functools import cache

from quire.ops.triton.binaries import Binary
from quire.ops.triton.build import build
from quire.ops.triton.jobs import cache_folder
from quire.ops.triton.variants import Variant, all_variants, some_of_each
from tests.ops.triton.samples import product, scale

FOLDER = cache_folder() / "tests"
SAMPLES_FOLDER = cache_folder() / "tests_of_samples"
"""A build waits for another into its folder, and that of all variants takes minutes, once."""
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
MOST_OF_A_KERNEL = 4
"""So many variants of each kernel the gate compiles: those that a suite has time for."""


VARIANTS = some_of_each(all_variants(), MOST_OF_A_KERNEL)
"""The variants that the gate holds. `scripts/kernel_report` looks at all of them, and on all cards."""


@cache
def compiled_samples() -> tuple[Binary, Binary]:
    """`SCALE` and `PRODUCT`, compiled for sm_90."""
    scale, product = build([SCALE, PRODUCT], "sm_90", SAMPLES_FOLDER)
    assert isinstance(scale, Binary)
    assert isinstance(product, Binary)
    return scale, product
