"""`quire`: the table of commands, and the process's exit."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from quire.core import process_start  # noqa: F401  (first, because it records when the program began)
from quire.frontend.cli.bench import BENCH
from quire.frontend.cli.command_group import FAILED, INTERRUPTED, Command, CommandGroup, complain

QUIRE = CommandGroup(
    "Serves large language models.",
    {
        "serve": Command("quire.frontend.cli.serve", "Serve a model over HTTP with OpenAI's API.", is_service=True),
        "plan": Command("quire.frontend.cli.plan", "Say what a model would take of memory, and what fits beside it."),
        "check-cluster": Command(
            "quire.frontend.cli.check_cluster",
            "Say whether hosts can serve one model together; run it on each of them.",
        ),
        "run-batch": Command("quire.frontend.cli.run_batch", "Run a JSONL file of requests through a model."),
        "chat": Command("quire.frontend.cli.chat", "Chat with the model of a running server."),
        "complete": Command("quire.frontend.cli.complete", "Complete text with the model of a running server."),
        "bench": BENCH,
        "save-sharded-state": Command(
            "quire.frontend.cli.save_sharded_state", "Write a checkpoint as files that each rank reads alone."
        ),
        "pack": Command("quire.frontend.cli.pack", "Write a checkpoint as packed weights, which a start maps."),
        "completions": Command(
            "quire.frontend.cli.shell_completions", "Print what completes Quire's commands in your shell."
        ),
        "replay": Command("quire.frontend.cli.replay", "Run what a flight recorder has of an engine again."),
        "doctor": Command(
            "quire.frontend.cli.doctor", "Say what stands out of a flight recorder, a crash or this machine."
        ),
        "collect-env": Command("quire.frontend.cli.collect_env", "Print what a bug report should say of this machine."),
    },
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `quire` and exits; Ctrl-C exits with code 130 and prints nothing."""
    try:
        code = QUIRE.run("quire", list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone
        _drop_output()
        code = 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        code = complain("quire", f"cannot write: {error.strerror}.", FAILED)
    sys.exit(code)


def _drop_output() -> None:
    """Discards unwritten output; else Python would report the broken pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
