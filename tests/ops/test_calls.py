"""The calls that Python packs are those that the C++ kernels read."""

import re
import struct
from pathlib import Path

import pytest
import torch

from quire.ops import cpu
from quire.ops.cpu import calls
from quire.ops.cpu.calls import DTYPES, Call

KERNELS = Path(cpu.__file__).parent / "kernels"
CALLS = [value for value in vars(calls).values() if isinstance(value, Call)]


def fields_of_structs() -> dict[str, list[tuple[str, str]]]:
    """(name, struct format) of each field, by struct, as kernels.h has them."""
    text = re.sub(r"//.*", "", (KERNELS / "kernels.h").read_text())
    structs = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        structs[name] = fields = []
        for kind, names in re.findall(r"\s*((?:const )?\w+)\b([^;]+);", body):
            if kind in structs:
                owner = names.strip().removesuffix("form")  # of several forms, each field has the name of its layer
                fields += [(owner + field, form) for field, form in structs[kind]]
                continue
            for field in names.split(","):
                form = "P" if "*" in field else {"int64_t": "q", "double": "d"}[kind]
                fields.append((field.strip(" *"), form))
    return structs


def test_names_and_kinds_of_all_fields_are_those_of_the_header() -> None:
    prototypes = re.findall(r"int (\w+)\(const quire::(\w+)\* call\);", (KERNELS / "kernels.h").read_text())
    structs = fields_of_structs()
    expected = {kernel: structs[name] for kernel, name in prototypes}
    assert len(expected) > 10
    packed = {
        call.kernel: [
            (name, form)
            for form, names in (("P", call.pointers), ("q", call.integers), ("d", call.floats))
            for name in names.split()
        ]
        for call in CALLS
    }
    assert packed == expected


def test_a_struct_has_eight_bytes_for_each_field() -> None:
    for call in CALLS:
        assert call.layout.size == 8 * len(f"{call.pointers} {call.integers} {call.floats}".split())


@pytest.mark.parametrize("fields", [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6.5)])
def test_a_call_with_other_fields_is_refused(fields: tuple[float, ...]) -> None:
    with pytest.raises(struct.error):
        calls.TAKE_ROWS.layout.pack(*fields)


def test_dtypes_have_the_numbers_of_the_header() -> None:
    [numbers] = re.findall(r"enum Dtype \{(.*?)\}", (KERNELS / "vector.h").read_text())
    names = {"FLOAT32": torch.float32, "BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16}
    assert {names[name]: int(number) for name, number in re.findall(r"(\w+) = (\d+)", numbers)} == DTYPES
