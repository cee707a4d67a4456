"""The fuzz tests of the suite with new examples each time, each for so many seconds."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "fuzz"
SUMMARY = "The suite's fuzz tests with new examples, each for a time."
ROOT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60, help="For each target (default: %(default)g).")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="Only targets that match, as for pytest.")


def run(args: argparse.Namespace) -> int:
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
