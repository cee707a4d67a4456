"""Compiles a kernel for a card, which need not be here. Under `TRITON_INTERPRET`, there is no compiler."""

import re
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.ops.triton.arch import arch_of
from quire.ops.triton.binaries import Binary, store
from quire.ops.triton.chain import WAIT, compiling_for
from quire.ops.triton.jobs import Job
from quire.ops.triton.kernel_function import KernelFunction, is_pointer
from quire.ops.triton.specialization import ALIGNMENT, CONSTANT, SCALARS, Specialization

_POINTER_BYTES = 8
_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def compile_kernel(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
    """Compiles one kernel and stores it.

    Raises:
        ValueError: the compiled kernel takes other arguments than `launch.py` passes.
        Exception: as the compiler raises.
    """
    spec, arch = job.specialization, arch_of(job.arch)
    aligned = [
        number
        for number, name in enumerate(kernel.parameters)
        if is_pointer(name) and name not in spec.unaligned and spec.types[number] != CONSTANT
    ]
    source = ASTSource(
        kernel.function,
        dict(zip(kernel.parameters, spec.types, strict=True)),
        {(kernel.parameters.index(name),): value for name, value in spec.constants},
        {(number,): [["tt.divisibility", ALIGNMENT]] for number in aligned},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    with compiling_for(arch.backend, arch.target):
        compiled = triton.compile(source, target=GPUTarget(arch.backend, arch.target, arch.warp_size), options=options)
    metadata = compiled.metadata._asdict()
    num_hidden = _num_hidden_arguments(compiled.asm["ptx"], spec) if arch.backend == "cuda" else 0
    binary = Binary(
        key=job.key, kernel=kernel.name, specialization=str(spec), arch=arch.name, triton=triton.__version__,
        entry=metadata["name"], shared_bytes=metadata["shared"], num_warps=metadata["num_warps"],
        num_hidden=num_hidden, scratch_bytes=metadata.get("global_scratch_size", 0),
        scratch_alignment=metadata.get("global_scratch_align", 1),
        profile_bytes=metadata.get("profile_scratch_size", 0), waits=WAIT in compiled.asm.get("ptx", ""),
    )  # fmt: skip
    store(folder, binary, compiled.asm["cubin" if arch.backend == "cuda" else "hsaco"])
    return binary


def _num_hidden_arguments(ptx: str, spec: Specialization) -> int:
    """The pointers that the compiler adds behind the kernel's own parameters: to scratch memory.

    Raises:
        ValueError: the parameters are not those of `spec` with pointers behind them.
    """
    [parameters] = re.findall(r"\.visible \.entry \w+\(([^)]*)\)", ptx)
    sizes = [_PTX_BYTES[each] for each in re.findall(r"\.param \.[a-z](\d+)", parameters)]
    own = [argument_bytes(each) for each in spec.types if each != CONSTANT]
    hidden = sizes[len(own) :]
    if sizes[: len(own)] != own or set(hidden) - {_POINTER_BYTES}:
        raise ValueError(f"Triton {triton.__version__} passes arguments of {sizes} bytes for {spec.types}.")
    return len(hidden)


def argument_bytes(type_name: str) -> int:
    """Bytes of an argument of Triton's type."""
    if type_name.startswith("*"):
        return _POINTER_BYTES
    if type_name not in SCALARS:
        raise ValueError(f"a kernel's scalar must be one of {', '.join(SCALARS)}; got {type_name}.")
    return 8 if type_name.endswith("64") else 4
