"""Proves on this machine what docs/reliability.md promises.

    scripts/chaos streams                    ten minutes: streams of all kinds while processes are killed and stopped
    scripts/chaos streams --seconds 30       the cut that the suite runs
    scripts/chaos pauses                    how long streams wait after one kill or stop, on a quiet machine
    scripts/chaos soak                       20,000 short requests with random disconnects; memory and descriptors
    scripts/chaos connections                10,000 idle connections and clients with slow headers
    scripts/chaos bodies                     256 bodies of 8 MB at once, and one of 600 MB
    scripts/chaos fuzz                       the fuzz tests of the suite, each for a minute of new examples
    scripts/chaos recorder                   the cost of the flight recorder

Prints what it has found while it runs, and a table at the end, also when SIGINT or SIGTERM cuts it. Exits with 1 if
anything was lost or wrong.
"""

import argparse
import sys

import bodies
import connections
import fuzz
import kills
import pauses
import recorder_cost
import soak
from server import ServerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (kills, pauses, soak, connections, bodies, fuzz, recorder_cost):
        command = commands.add_parser(module.NAME, help=module.SUMMARY)
        command.add_argument("--model", help="The checkpoint's folder; the demo model when unset.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        code: int = args.run(args)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
