"""Runs the canary's cases, which are tiny, under NVIDIA's compute-sanitizer: accesses out of bounds, and races.

Races are those of shared memory: the tool sees none between programs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from part_results import Results

TOOLS = ("memcheck", "racecheck")
SUITE = "quire.ops.triton.canary_cases"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", help="Names of the canary's cases (default: all).")
    parser.add_argument("--seconds", type=int, default=120, help="Limit of each tool (default: %(default)s).")
    args = parser.parse_args()
    results = Results.of_part()
    program = find_sanitizer()
    if program is None:
        results.add(sanitizer="compute-sanitizer", outcome_of_tool="not installed: nothing was checked")
        return
    cases = args.cases or names_of_cases()
    faults = [tool for tool in TOOLS if not run(program, tool, cases, args.seconds, results)]
    sys.exit(1 if faults else 0)


def find_sanitizer() -> str | None:
    """The program on the path, or in an installed CUDA toolkit."""
    found = shutil.which("compute-sanitizer")
    installed = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return found or (str(installed[-1]) if installed else None)


def names_of_cases() -> list[str]:
    from quire.ops.triton.canary_cases import CASES  # takes seconds, which a machine without the tool saves

    return [case.name for case in CASES]


def run(program: str, tool: str, cases: Sequence[str], seconds: float, results: Results) -> bool:
    """Runs one tool over the cases; returns True if it found nothing."""
    command = [program, "--tool", tool, "--error-exitcode", "99", sys.executable, "-m"]
    command += ["quire.ops.triton.canary_process", SUITE, *cases]
    # Torch's pool would hide accesses behind the end of a tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "QUIRE_TRITON_CANARY": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        results.add(sanitizer=tool, outcome_of_tool=f"stopped after {seconds:.0f} s")
        return False
    text = done.stdout + done.stderr
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    is_clean = (
        done.returncode == 0 and bool(summaries) and all(re.search(r": 0 (errors|hazards)", each) for each in summaries)
    )
    results.add(sanitizer=tool, outcome_of_tool=summaries or f"exit code {done.returncode}", cases=len(cases))
    if not is_clean:
        print(text[-4000:])
    return is_clean


if __name__ == "__main__":
    main()
