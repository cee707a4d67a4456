"""The fuzz tests of the suite with more examples, new ones each time."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

NAME = "fuzz"
SUMMARY = "The suite's fuzz tests with many new examples."
ROOT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=int, default=20_000, help="Of each test (default: %(default)s).")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="Only the tests that match, as for pytest.")


def run(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "tests/fuzz", "-k", args.k]
    environment = os.environ | {"QUIRE_FUZZ_EXAMPLES": str(args.examples)}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode
