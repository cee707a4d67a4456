"""A process that runs cases on kernels and on plain torch: `python -m quire.ops.triton.canary_process MODULE NAME...`.

`MODULE` has `CASES` and `backends()`, as `canary_cases.py` has. The name of each case is written to standard output,
as JSON, when it starts, and what was wrong with it, or an empty text, when it ends. It may fault or hang.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import torch
from torch import Tensor

from quire.ops.triton.canary_inputs import UNDECIDED, Case, Inputs

_OCCUPIED = ("out of memory", "busy or unavailable")
"""Parts of CUDA's messages about a card that other work occupies."""

_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 1e-4}


def fault_of(case: Case, backend: Any, reference: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Returns what is wrong with a case; an empty text if nothing is.

    What begins with `UNDECIDED` says nothing of the kernels: other work leaves no room on the card.
    """
    try:
        expected = [each.cpu() for each in case.run(reference, Inputs(device, dtype))]
        got = [each.cpu() for each in case.run(backend, Inputs(device, dtype))]
    except torch.OutOfMemoryError as error:
        return f"{UNDECIDED}{error}"
    except Exception as error:  # kernels and their compiler may raise anything
        occupied = any(text in str(error) for text in _OCCUPIED)
        return f"{UNDECIDED if occupied else ''}{type(error).__name__}: {error}"
    return difference(got, expected, _TOLERANCES[dtype])


def difference(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """Tells the first results that differ: by more than rounding, if they are numbers; empty if none do."""
    for number, (ours, right) in enumerate(zip(got, expected, strict=True)):
        if ours.shape != right.shape or ours.dtype != right.dtype:
            return f"result {number} is {ours.dtype} {list(ours.shape)}, not {right.dtype} {list(right.shape)}"
        if not ours.is_floating_point():
            is_wrong = ours != right
        else:
            size = right.float().abs().nan_to_num(0, 0, 0).max().clamp(min=1.0) if right.numel() else 1.0
            is_wrong = ~torch.isclose(ours.float(), right.float(), tolerance, tolerance * float(size), equal_nan=True)
        if is_wrong.any():
            place = int(is_wrong.flatten().nonzero()[0])
            values = f"{ours.flatten()[place].item():.6g} instead of {right.flatten()[place].item():.6g}"
            return f"result {number}: {int(is_wrong.sum())} of {ours.numel()} values are wrong; first {values}"
    return ""


def main(module: str, names: Sequence[str], answers: TextIO) -> None:
    """Runs the cases of these names, in their order."""
    has_card = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if has_card else (torch.device("cpu"), torch.float16)
    suite = importlib.import_module(module)
    backend, reference = suite.backends()
    cases = {case.name: case for case in suite.CASES}
    for name in names:
        print(json.dumps([name]), file=answers, flush=True)
        print(json.dumps([name, fault_of(cases[name], backend, reference, device, dtype)]), file=answers, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # so that nothing that is printed counts as an answer
    main(sys.argv[1], sys.argv[2:], answers)
    os._exit(0)  # whatever state the device is in
