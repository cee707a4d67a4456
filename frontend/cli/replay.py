"""`quire replay`: runs what a flight recorder has of an engine again, and names the first step that differs."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.core.logging import LoggingConfig, configure
from quire.frontend.flags.parser import CommandParser

if TYPE_CHECKING:
    from quire.core.config.resolved import EngineConfig
    from quire.core.engine.replay import ReplayReport
    from quire.core.flight.recording import Recording

DIFFERS = 1
"""Exit code where a step brought other tokens, or failed."""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "recording", metavar="PATH", help="A folder of --flight-recorder, or the file that the log names after a crash."
    )
    parser.add_argument("--model", metavar="DIR", help="The checkpoint's folder, if it is another one now.")
    parser.add_argument(
        "--engine",
        type=int,
        metavar="N",
        help="Which of a folder's engines, from 0, the oldest; the newest when unset.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def run(args: argparse.Namespace) -> int:
    # Imported here, so that --help loads no tokenizer.
    from quire.core.errors import ConfigError
    from quire.core.flight.recording import find_recordings
    from quire.frontend.launch.replay import config_of, replay

    configure("replay", LoggingConfig())
    recordings = find_recordings(Path(args.recording))
    number = len(recordings) - 1 if args.engine is None else args.engine
    if not 0 <= number < len(recordings):
        raise ConfigError(f"--engine must be from 0 to {len(recordings) - 1}: so many engines recorded there.")
    recording = recordings[number]
    config = config_of(recording, args.model)
    report = replay(recording, config, _vocabularies(recording, config))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(as_text(report)))
    return DIFFERS if report.difference is not None or report.failure is not None else 0


def _vocabularies(recording: "Recording", config: "EngineConfig") -> dict[str, bytes]:
    """The contents of the recorded grammars' vocabularies, by path; made of the tokenizer, as the server made them."""
    from quire.core.engine.replay import vocabulary_names
    from quire.frontend.grammar.vocabulary import PREFIX, make_vocabulary
    from quire.frontend.text.tokenizer import Tokenizer

    names = vocabulary_names(recording)
    if not names:
        return {}
    spec = config.spec
    tokenizer = Tokenizer.from_folder(Path(spec.tokenizer_path or spec.path), "auto", spec.trust_remote_code)
    ends = [token_id for token_id in spec.eos_token_ids if 0 <= token_id < spec.vocab_size]
    found = {}
    for path, memory_file in names.items():
        name = memory_file.rpartition(PREFIX)[2].split(" ")[0]
        found[path] = msgspec.msgpack.encode(make_vocabulary(tokenizer, name, spec.vocab_size, ends))
    return found


def as_text(report: "ReplayReport") -> Iterator[str]:
    """Lines for people."""
    yield (
        f"{report.num_steps} steps ran again, with {report.num_rows} rows and {report.num_tokens} compared tokens; "
        f"left out: {report.num_left_out} rows, which depend on steps before the recording."
    )
    if report.num_unanswered:
        yield f"{report.num_unanswered} of these steps have no result in the recording; here they ended."
    if report.failure is not None:
        yield f"Step {report.failed_step} failed: {report.failure}"
    if (found := report.difference) is not None:
        yield (
            f"Step {found.step_id} differs, {found.seconds} s after the engine's start: request {found.request_id}, "
            f"token {found.position}: recorded {found.recorded}, now {found.replayed}."
        )
    elif report.failure is None:
        yield "No step differs."
