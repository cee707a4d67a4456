"""Runs engines in turn, each in a process of its own: a script calls itself with `--measure ENGINE`.

It needs no package, so the peers' environments run it as well.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `run` reads, and `--measure`."""
    parser.add_argument("--engines", nargs="+", default=["quire:float32"], help="Of this environment.")
    parser.add_argument("--peers", nargs="*", default=[], help="Of the environment of --peer-python.")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one engine, in this process


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, list[Any]]:
    """Returns by engine the values of all rounds: the last line that `command --measure ENGINE` prints, JSON."""
    pythons = dict.fromkeys(args.engines, sys.executable) | dict.fromkeys(args.peers, args.peer_python)
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for _ in range(args.rounds):
        for name, python in pythons.items():
            done = subprocess.run([python, *command, "--measure", name], stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, found[name][-1], flush=True)
    return found
