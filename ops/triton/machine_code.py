"""What a compiled kernel takes of a card, and which instructions it has, by the disassembler that Triton brings."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton

from quire.ops.triton.arch import arch_of
from quire.ops.triton.binaries import Binary, code_path

_FAMILIES = (
    "LDG.E.128", "LDG.", "STG.E.128", "STG.", "LDGSTS.E.BYPASS.128", "LDGSTS.", "UTMALDG", "STL", "LDL",
    "HGMMA", "HMMA", "IGMMA", "IMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "I2F", "F2F", "BAR",
)  # fmt: skip
"""Beginnings of the instructions that are counted."""

_WAIT = "ACQBULK"
_ACCESSES = ("LDG", "LD.", "LDGSTS", "STG", "ST.", "ATOM", "RED", "UTMA")

_RESERVED_BYTES = 1024  # of shared memory, which the system takes for each program beside the limit


class MachineCode(NamedTuple):
    """A kernel's machine code.

    Attributes:
        num_registers: 32-bit registers of a thread.
        stack_bytes: memory of a thread that registers spill to.
        shared_bytes: of a program, static and dynamic.
        num_instructions: of all kinds.
        instructions: numbers of some kinds, such as `HGMMA` or `LDG.E.128`.
        num_early_accesses: reads and writes of memory, other than prefetches, that stand before the wait for other
            kernels (`chain.py`); 0 without a wait.
        programs_per_processor: programs that fit on a multiprocessor by registers and shared memory.
    """

    num_registers: int
    stack_bytes: int
    shared_bytes: int
    num_instructions: int
    instructions: dict[str, int]
    num_early_accesses: int
    programs_per_processor: int


def inspect_code(folder: Path, binary: Binary) -> MachineCode:
    """Disassembles an NVIDIA binary, once: what is found is kept beside it."""
    path = folder / f"{binary.key}.code.json"
    try:
        return MachineCode(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        code = _disassemble(code_path(folder, binary), binary)
        path.write_text(json.dumps(code._asdict()))
        return code


def _disassemble(cubin: Path, binary: Binary) -> MachineCode:
    usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
    taken = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    listing = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin))
    sequence = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE)
    mnemonics = Counter(sequence)
    early = sequence[: sequence.index(_WAIT)] if _WAIT in sequence else []
    counts = {
        family.rstrip("."): sum(mnemonics[each] for each in mnemonics if each.startswith(family))
        for family in _FAMILIES
    }
    shared = binary.shared_bytes + max(taken["SHARED"] - _RESERVED_BYTES, 0)
    arch = arch_of(binary.arch)
    threads = binary.num_warps * arch.warp_size
    by_registers = arch.num_registers // (max(taken["REG"], 1) * threads)
    return MachineCode(
        num_registers=taken["REG"],
        stack_bytes=taken["STACK"],
        shared_bytes=shared,
        num_instructions=mnemonics.total(),
        num_early_accesses=sum(each.startswith(_ACCESSES) for each in early),
        instructions={family: count for family, count in counts.items() if count},
        programs_per_processor=min(by_registers, arch.max_shared_bytes // (shared + _RESERVED_BYTES), 2048 // threads),
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
