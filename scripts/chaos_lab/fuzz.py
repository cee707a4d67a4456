"""The fuzz tests of the suite with new examples each time, each for so many seconds.

With --guided, atheris drives the decoders of `tests/fuzz/decoders.py` instead: it keeps inputs that reach new branches.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "fuzz"
SUMMARY = "The suite's fuzz tests with new examples, each for a time."
ROOT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60, help="For each target (default: %(default)g).")
    parser.add_argument(
        "--guided", action="store_true", help="By branches reached; needs atheris (pip install atheris)."
    )
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="Only targets that match, as for pytest.")


def run(args: argparse.Namespace) -> int:
    return _run_guided(args) if args.guided else _run_suite(args)


def _run_suite(args: argparse.Namespace) -> int:
    with tempfile.NamedTemporaryFile("r", prefix="fuzz-") as counts:
        environment = os.environ | {"QUIRE_FUZZ_SECONDS": str(args.seconds), "QUIRE_FUZZ_COUNTS": counts.name}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/fuzz",
            "-k",
            args.k,
            "--timeout",
            f"{args.seconds + 300:.0f}",
        ]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        print("| target | examples | seconds |")
        print("|---|---|---|")
        for line in counts:
            name, number, seconds = line.rstrip("\n").split("\t")
            print(f"| {name.removeprefix('tests/fuzz/')} | {number} | {seconds} |")
    return code


def _run_guided(args: argparse.Namespace) -> int:
    from tests.fuzz.decoders import DECODERS, LIBRARIES

    code, program = 0, Path(__file__).parent / "guided.py"
    print("| decoder | inputs | with new branches | found |")
    print("|---|---|---|---|")
    for name in DECODERS | LIBRARIES:
        if args.k not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            command = [sys.executable, str(program), name, str(int(args.seconds)), folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
            counts = dict(re.findall(r"^stat::(\w+): +(\d+)", done.stderr, re.MULTILINE))
            tried, kept = counts.get("number_of_executed_units", "?"), counts.get("new_units_added", "?")
            print(
                f"| {name} | {tried} | {kept} | {'nothing' if done.returncode == 0 else 'an error, below'} |",
                flush=True,
            )
            if done.returncode:
                code = 1
                print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
                for path in Path(folder).glob("crash-*"):
                    print(f"input: {path.read_bytes()!r}")
    return code
