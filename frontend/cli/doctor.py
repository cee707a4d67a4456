"""`quire doctor`: reads what a flight recorder or `quire collect-env` wrote, and says what stands out."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from quire.core.flight.records import SUFFIX
from quire.frontend.flags.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH",
        help="Folders of --flight-recorder, files that the log names after a crash, outputs of `quire collect-env`; "
        "none: this machine, and the crashes that it keeps.",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    for line in lines(args.paths):
        print(line)


def lines(names: list[str]) -> Iterator[str]:
    """What there is to say of each path, or of this machine. Raises ConfigError."""
    # Imported here, so that --help loads neither scheduler nor probes.
    from quire.core.flight.dumps import dump_folder
    from quire.core.flight.recording import find_recordings
    from quire.frontend.cli import collect_env
    from quire.frontend.cli.doctor_machine import examine_machine
    from quire.frontend.cli.doctor_recording import examine_recording

    paths = [Path(name).expanduser() for name in names]
    if not names:
        yield "This machine"
        yield from examine_machine({name: str(value) for _, facts in collect_env.sections() for name, value in facts})
        paths = [dump_folder()] if any(dump_folder().glob(f"*{SUFFIX}")) else []
    for path in paths:
        if path.is_file() and path.suffix != SUFFIX:
            yield str(path)
            yield from examine_machine(collect_env.read_facts(path))
            continue
        for recording in find_recordings(path):
            yield ", ".join(map(str, recording.files))
            yield from examine_recording(recording)
