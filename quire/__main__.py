"""The program `quire`, which is also `python -m quire`."""

import os
import signal
import sys


def main() -> None:
    """Runs `quire` and exits; Ctrl-C exits with code 130 and prints nothing, also while the program is imported."""
    if sys.argv[1:2] == ["serve"]:  # a service, which SIGTERM ends with 0, also while the program is imported
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        from quire.frontend.cli.main import main as run  # imported here, because it takes a while

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
