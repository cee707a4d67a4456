"""Runs `quire` commands in the test's own process, which has imported what a new one takes seconds to import."""

import contextlib
import io
from subprocess import CompletedProcess

from quire.frontend.cli.main import main


def quire(*arguments: str) -> CompletedProcess[str]:
    """The exit code and the texts of a command; what its child processes write goes to this process's own streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
