"""One decoder under atheris, which looks for inputs that reach new branches: `guided.py NAME SECONDS FOLDER`."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["quire"], enable_loader_override=False):
    from tests.fuzz.decoders import DECODERS, LIBRARIES, SEEDS


def main() -> None:
    name, seconds, folder = sys.argv[1:]
    for number, seed in enumerate(SEEDS[name]):
        (Path(folder) / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options, folder], (DECODERS | LIBRARIES)[name])
    atheris.Fuzz()


main()
